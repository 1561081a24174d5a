"""What launchers of Triton kernels share."""

# Multiprocessors of an H200, for which block sizes are tuned.
PROCESSORS = 132


def stride_unit(*strides: int) -> int:
    """8 where all the strides are multiples of it, else 1; for a kernel that takes strides in that unit.

    Triton loads whole vectors only where it can see that they are aligned, and of a stride it sees only
    whether it is a multiple of 16. The 3352 columns of the 130m model's in_proj are not: a kernel that
    reads a slice of them loads element by element. Passed as `stride // unit` and multiplied by the
    constant `unit` in the kernel (in int64: it is the quotient that Triton saw fit 32 bits), the stride is
    seen to be a multiple of 8.
    """
    return 8 if all(stride % 8 == 0 for stride in strides) else 1
