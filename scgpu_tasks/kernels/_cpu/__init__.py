"""CPU forms: Numba loops that release the GIL, one thread each."""
