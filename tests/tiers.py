"""Which tests ``make test`` leaves to ``make test-slow``, chosen by their measured durations.

``make test`` takes six minutes on two cores and guards every promise: parity, one whole training of each recipe, two
workers by ``fit`` and by hand, faults, grids of workers, a sharded checkpoint, one ``lockstep run``, one ``ls.launch``,
one ``lockstep verify``.
"""

from __future__ import annotations

# Files whose tests are slow, except for the tests named.
SLOW_FILES: dict[str, tuple[str, ...]] = {
    "cli/test_backup.py": (),
    "cli/test_bench_pipeline.py": (),
    "cli/test_doctor.py": (),
    "cli/test_run.py": (
        "test_the_workers_meet_the_chief_is_heard_and_every_worker_has_a_log",
        "test_the_first_failure_is_named_with_its_traceback_not_its_victims",
        "test_the_exit_code_is_that_of_the_worker",
    ),
    "cli/test_run_elastic.py": (
        "test_those_that_are_left_go_on_and_lost_ones_come_back",
        "test_a_failure_of_the_program_is_no_loss",
    ),
    "cli/test_run_elastic_training.py": (),
    "cli/test_run_hosts.py": (),
    "cli/test_run_unchanged.py": (),
    "cli/test_train_images.py": ("test_a_run_prints_devices_epochs_and_result_and_leaves_its_files",),
    "cli/test_train_mlm.py": (
        "test_a_run_prints_devices_epochs_and_result_and_leaves_its_files",
        "test_a_missing_package_is_one_line_before_anything_is_trained",
        "test_ctrl_c_ends_a_run_in_one_line",
    ),
    "cli/test_train_reviews.py": ("test_a_run_prints_data_epochs_result_and_answers_and_leaves_its_files",),
    "cli/test_finished_runs.py": (),
    "cluster/test_launched_jobs.py": (
        "test_mpirun_trains_one_model",
        "test_processes_with_these_variables_train_one_model",
    ),
    "data/test_resume.py": (),
    "data/test_streams_workers.py": (),
    "examples/test_coming_from.py": ("test_the_pages_show_the_lines_that_differ",),
    "docs/test_tutorials.py": (),
    "docs/test_why_numbers_differ.py": (),
    "examples/test_programs.py": (
        "test_the_programs_stand_alone_and_are_short",
        "test_a_wrong_device_ends_in_one_line",
        "test_a_loop_of_its_own_prints_the_numbers_of_one_device_and_learns",
    ),
    "integrations/test_keras_backup.py": (
        "test_rows_of_a_loader_that_draws_are_those_that_were_left",
        "test_what_cannot_be_continued_is_refused",
    ),
    "examples/test_published.py": (),
    "integrations/test_keras_examples.py": ("test_few_lines_differ_from_the_program_for_one_device",),
    "integrations/test_keras_workers.py": (),
    "integrations/test_transformers_checkpoints.py": ("test_a_rerun_and_a_resumed_run_are_bit_equal_with_dropout",),
    "integrations/test_transformers_evaluation.py": (),
    "integrations/test_transformers_use.py": (
        "test_it_takes_the_strategy_given_or_in_scope_or_all_devices",
        "test_what_cannot_work_is_refused_in_one_line",
        "test_without_rows_no_forward_pass_runs_and_the_numbers_are_those_of_one_device",
    ),
    "integrations/test_transformers_workers.py": (),
    "launch/test_batch_size.py": (
        "test_the_largest_that_fits_is_found_to_a_sixteenth_and_below_the_bound",
        "test_for_speed_the_search_ends_where_larger_batches_bring_nothing",
        "test_a_bound_below_the_number_of_replicas_is_tried_as_it_is",
        "test_what_counts_as_no_more_memory",
        "test_a_killed_trial_does_not_fit_and_other_failures_are_raised_as_they_are",
        "test_where_nothing_fits_the_error_is_one_of_memory",
        "test_a_model_is_as_before_and_the_trials_are_used_again",
        "test_what_cannot_be_tried_is_refused",
    ),
    "launch/test_launch.py": (
        "test_the_chief_s_result_comes_back",
        "test_the_error_of_a_worker_is_the_cause_and_the_worker_is_named",
        "test_a_worker_has_this_process_s_variables_and_its_share_of_the_cores",
    ),
    "membership/test_many_members.py": (
        "test_only_the_chief_reads_every_heartbeat",
        "test_what_is_equal_for_all_takes_no_room",
        "test_of_many_names_the_first_are_shown",
    ),
    "membership/test_rendezvous.py": (
        "test_all_come_in_any_order_and_know_of_each_other",
        "test_a_process_of_another_job_is_refused_and_disturbs_nobody",
    ),
    "membership/test_heartbeat.py": (
        "test_a_worker_that_goes_silent_is_lost_on_all_others",
        "test_the_chief_is_lost_with_its_store",
    ),
    "mirroring/test_surrounding_compile.py": ("test_a_forward_that_is_no_single_graph_runs_as_it_is_with_a_warning",),
    "parallel/test_vocab_parallel_sharded.py": (),
    "recipes/images/test_resume.py": (),
    "recipes/images/test_run.py": (
        "test_three_replicas_compute_what_one_device_computes",
        "test_any_number_of_replicas_and_workers_sees_the_same_pictures",
    ),
    "recipes/mlm/test_resume.py": (),
    "recipes/mlm/test_run.py": ("test_two_replicas_learn_and_are_tested",),
    "recipes/reviews/test_run.py": ("test_two_replicas_learn_and_answer_and_leave_a_model_that_pipeline_reads",),
    "recipes/text/test_python_text.py": (),
    "same_bits/test_same_bits_more.py": (),
    "strategies/test_cores.py": (),
    "strategies/test_multi_worker_choices.py": (),
    "strategies/test_multi_worker_disagreements.py": (),
    "strategies/test_multi_worker_faults.py": (
        "test_a_worker_that_is_killed_in_mid_step_is_named",
        "test_a_worker_that_exits_in_mid_training_is_named",
        "test_an_exception_in_one_worker_is_the_other_s_error",
        "test_ctrl_c_in_one_worker_ends_the_other",
    ),
    "strategies/test_multi_worker_kills.py": (),
    "strategies/test_multi_worker_network.py": (),
    "strategies/test_parallel_checkpoints.py": (
        "test_a_checkpoint_that_another_layout_has_loaded_and_saved_is_the_same",
    ),
    "strategies/test_parallel_faults.py": ("test_a_worker_that_is_lost_in_mid_step_is_named",),
    "strategies/test_parallel_inputs.py": (),
    "strategies/test_parallel_meta.py": (),
    "strategies/test_parallel_pretrained.py": (),
    "strategies/test_parallel_recomputed.py": (),
    "strategies/test_parallel_schedules.py": (),
    "strategies/test_vocab_parallel.py": (),
    "strategies/test_parallel_sequences.py": (),
    "strategies/test_parallel_sharding.py": (),
    "test_docs.py": (),
    "test_packaging.py": ("test_an_extra_installs_what_the_source_requires_with_it",),
    "train/test_divided_layouts.py": (),
    "train/test_resume_killed.py": (),
    "train/test_resume_workers.py": (),
    "verify/test_causes.py": ("test_dropout_alone_is_nothing_wrong",),
}

# Single tests that are slow.
SLOW_TESTS: dict[str, tuple[str, ...]] = {
    "checkpoint/test_folder.py": ("test_a_folder_without_permission_is_one_line",),
    "cli/test_bench.py": ("test_one_command_measures_prints_and_leaves_two_files",),
    "mirroring/test_compile.py": (
        "test_two_replicas_compile_once_and_have_the_numbers_of_the_module_as_it_is",
        "test_a_second_process_finds_the_compiled_code_and_has_the_same_bits",
        "test_compiled_products_go_to_onednn_where_it_is_faster",
    ),
    "integrations/test_keras_compiled.py": ("test_predict_before_any_training_compiles_once_and_ends",),
    "recipes/images/test_small_data.py": (
        "test_few_separable_images_are_learnt",
        "test_the_best_epoch_is_kept_whatever_comes_after",
        "test_any_number_of_replicas_computes_the_same_statistics",
    ),
    "recipes/memory/test_parity.py": (
        "test_two_workers_learn_as_one_device",
        "test_on_two_workers_checkpointing_draws_the_same_masks_again",
    ),
    "scaling/test_html_report.py": (
        "test_a_browser_shows_every_number_and_all_plots",
        "test_a_narrow_window_shows_the_same_and_nothing_sticks_out",
        "test_a_browser_refuses_what_the_page_would_ask_for",
    ),
    "strategies/test_logical_gpu_programs.py": ("test_masked_language_modelling_on_four_shares",),
    "train/test_learning_rate.py": ("test_two_workers_agree_when_to_stop_and_have_one_device_s_numbers",),
    "train/test_resume.py": ("test_a_record_with_values_of_another_type_is_passed_over_by_name",),
}

# Of these files: the parameters of the tests that are not slow; "" for a test without.
NOT_SLOW_PARAMETERS: dict[str, tuple[str, ...]] = {
    "test_readme.py": ("", "README.md", "bash", "python"),
    "strategies/test_parallel.py": (
        "bert-tensor2",
        "gpt2-tensor2",
        "bert-pipeline2",
        "gpt2-pipeline2",
        "bert-data2-tensor2",
    ),
}

# Single tests of which some parameters are slow, or are many of a kind: these.
SLOW_PARAMETERS: dict[tuple[str, str], tuple[str, ...]] = {
    ("cluster/test_launched_jobs.py", "test_mpirun_trains_one_model"): ("MPICH",),
    ("cluster/test_launched_jobs.py", "test_processes_with_these_variables_train_one_model"): (
        "Flux",
        "SkyPilot",
        "Azure's mpirun",
        "Vertex AI",
        "SageMaker",
    ),
    ("integrations/test_transformers.py", "test_it_equals_one_device"): (
        "several classes",
        "stream",
        "causal smoothing",
        "masked smoothing",
        "causal, not across",
        "label smoothing",
        "adafactor",
        "one number",
        "drop last",
        "by length",
        "model_init",
        "tags",
        "schedule",
        "plateau",
        "datasets",
    ),
    (
        "integrations/test_transformers_examples.py",
        "test_pairs_stay_together_and_the_numbers_are_those_of_one_device",
    ): (
        "blocks-3-args1",
        "blocks-4-args2",
        "padded on the left-3-args3",
        "interleaved-3-args4",
    ),
    ("mirroring/test_compile.py", "test_compiled_dropout_draws_from_each_replica_and_is_the_same_in_every_run"): (
        "in place",
        "recomputed",
    ),
    ("mirroring/test_compile.py", "test_a_replica_that_divides_integers_by_zero_always_has_the_error_itself"): (
        "floor_divide",
        "fmod",
    ),
    ("recipes/memory/test_parity.py", "test_checkpointing_draws_the_same_masks_again"): (
        "False-trainer",
        "False-loop",
        "False-fit",
    ),
    ("recipes/memory/test_parity.py", "test_adapters_learn_as_on_one_device"): ("4-trainer",),
    ("recipes/memory/test_parity.py", "test_checkpointing_changes_no_number"): ("reentrant-trainer",),
    ("same_bits/test_same_bits.py", "test_every_step_has_the_bits_of_one_device"): ("2 + 1 + 1",),
    (
        "strategies/test_parallel_checkpoints.py",
        "test_a_checkpoint_that_another_layout_has_loaded_and_saved_is_the_same",
    ): ("one-one on eight-step-00000004-eight",),
}

# Files with tests of half a minute and more: each process of tests begins with its part of them.
BEGUN_FIRST = (
    "cli/test_backup.py",
    "launch/test_launch.py",
    "same_bits/test_same_bits.py",
    "same_bits/test_same_bits_more.py",
    "strategies/test_parallel.py",
    "strategies/test_parallel_checkpoints.py",
    "strategies/test_parallel_schedules.py",
    "strategies/test_logical_gpu_programs.py",
    "test_docs.py",
    "test_packaging.py",
    "train/test_resume_killed.py",
    "train/test_resume_workers.py",
)


def is_slow(file: str, test: str) -> bool:
    """Whether ``make test`` leaves a test out.

    Args:
        file: relative to ``tests``, such as ``"cli/test_run.py"``.
        test: the name with parameters, such as ``"test_losses[bert-tensor2]"``.
    """
    name, _, parameters = test.partition("[")
    if file in NOT_SLOW_PARAMETERS:
        return parameters.removesuffix("]") not in NOT_SLOW_PARAMETERS[file]
    if parameters.removesuffix("]") in SLOW_PARAMETERS.get((file, name), ()):
        return True
    return name in SLOW_TESTS.get(file, ()) or (file in SLOW_FILES and name not in SLOW_FILES[file])
