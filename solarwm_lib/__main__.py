"""`python -m solarwm_lib`: the module form of the `solarwm` command, used under torchrun."""

from solarwm_lib.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
