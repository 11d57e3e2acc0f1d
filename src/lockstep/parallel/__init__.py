"""Models divided among workers: tensor parallelism, pipelines, full sharding, on torch's DeviceMesh and DTensor.

    mesh_layout, mesh                    which worker holds what (pure); torch's process groups for it
    transformers_plans                   how models of transformers are divided: their own plans, and ours
    model_plan, model_build              a model's whole plan, with every refusal (pure); a plan carried out
    tensor_plan, tensor_styles           which modules tensor ranks divide (pure); how one is divided, and sequences
    tensor_parallel, tp_rng              layers divided by a plan, and a worker's shards of them; their dropout
    vocab_parallel                       logits and losses divided by vocabulary
    pipeline_config, layer_split         schedules (pure); how many layers each stage gets (pure)
    pipeline_stage                       where a model is cut, and its stages
    stage_cut, stage_tracer              where a plain module is cut, into parts of a graph of its forward, by torch.fx
    pipeline, pipeline_trace             a training step through the stages; what ran when
    pipeline_values                      what stages give each other
    fsdp                                 weights sharded over the data axis
    deferred_init                        first weights of a model that was made on the meta device
    tensor_files, pretrained             safetensors files read whole or in boxes; trained weights for a model in them
    sharded_module, regions              a worker's part of a model as an nn.Module; its place in the whole tensors

Begin with ``model_plan``; ``strategies.parallel`` plans a model and has it built.
"""
