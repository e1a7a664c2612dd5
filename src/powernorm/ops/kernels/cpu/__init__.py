"""CPU kernels: a C++ library with a plain C interface, called with addresses and sizes."""
