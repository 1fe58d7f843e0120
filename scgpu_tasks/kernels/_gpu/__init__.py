"""GPU forms: CUDA kernels through CuPy, on the calling thread's current stream.

Arrays are CuPy's; masks, factors and tables may also be NumPy arrays, which are copied to the
device. Sums whose order matters are made in an order that depends on the rows alone, so that
the same rows give the same bytes on the same kind of device.
"""
