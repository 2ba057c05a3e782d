"""Kernels for CPUs in C++, where the loops that Inductor generates take several times as long."""
