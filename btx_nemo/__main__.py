"""`python -m btx_nemo` is the console script `btx-nemo`."""

from btx_nemo.cli import main

# Megatron's checkpoint writer spawns processes, which import this module again: the guard is needed.
if __name__ == "__main__":
    main()
