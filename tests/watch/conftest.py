"""The jobs of workers that tests of strategies start."""

from tests.strategies.conftest import free_ports, start_job, start_worker

__all__ = ["free_ports", "start_job", "start_worker"]
