"""What Lightning has to know about processes that are joined already."""

import os

from lightning.fabric.plugins import ClusterEnvironment

from powernorm.lab.engine.processes import local_rank, num_processes, rank


class RunningProcesses(ClusterEnvironment):
    """Tells Lightning about processes that are joined already, whoever started them."""

    @property
    def creates_processes_externally(self) -> bool:
        """Return that there is nothing to start."""
        return True

    @property
    def main_address(self) -> str:
        """Return where the first process is; not used, as the processes are joined."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """Return its port; not used either."""
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """Return whether there are several processes."""
        return num_processes() > 1

    def world_size(self) -> int:
        """Return the number of processes."""
        return num_processes()

    def set_world_size(self, size: int) -> None:
        """Do nothing: the number is given."""
        del size

    def global_rank(self) -> int:
        """Return the number of this process."""
        return rank()

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the number is given."""
        del rank

    def local_rank(self) -> int:
        """Return the number of this process on its machine."""
        return local_rank()

    def node_rank(self) -> int:
        """Return the number of this machine."""
        return int(os.environ.get("GROUP_RANK", 0))
