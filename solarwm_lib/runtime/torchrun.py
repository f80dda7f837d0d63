"""torchrun whose exit code is that of the first worker that failed: torchrun itself turns 75 (run me again) into 1.

python -m solarwm_lib.runtime.torchrun --standalone --nproc-per-node=2 -m solarwm_lib train ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from solarwm_lib.runtime.errors import Preempted


def main(arguments: Sequence[str]) -> int:
    """Run torchrun with `arguments`; return 0, the exit code of the first failed worker, or 75 after a stop signal."""
    try:
        run.main(list(arguments))
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code  # killed by a signal: as shells number it
    except SignalException as error:
        # torchrun has passed the signal on and waited for the workers, which save and end with 75.
        print(f"solarwm: torchrun stopped on request (signal {int(error.sigval)})", file=sys.stderr)
        return Preempted.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
