"""C++ kernels for CPUs, for operations that take several times as long in the loops that Inductor generates."""
