"""The jobs of workers that tests of strategies start."""

from tests.strategies.conftest import start_job, start_worker

__all__ = ["start_job", "start_worker"]
