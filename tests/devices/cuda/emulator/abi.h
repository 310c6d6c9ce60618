/* What a library of kernels, the streams (streams.cpp) and Python (driver.py) know of each other. */
#pragma once

enum { /* the driver's */
    CODE_SUCCESS = 0,
    CODE_INVALID_VALUE = 1,
    CODE_NOT_READY = 600,
    CODE_ILLEGAL_ADDRESS = 700,
    CODE_MISALIGNED = 716,
    CODE_LAUNCH_FAILED = 719,
};

enum { MESSAGE_BYTES = 1024 };

struct Launch;

/* call : one thread of the kernel.   sizes : bytes of its parameters.   max_threads : of its launch bounds.
 * run : n launches of its library, one after the other, of which all but the first may start early. */
struct Kernel {
    const char *name;
    void (*call)(void **arguments);
    int (*run)(const Launch *launches, int n, char *message);
    int n_parameters, max_threads;
    const int *sizes;
};

struct Launch {
    const Kernel *kernel;
    unsigned grid[3], threads[3], shared_bytes;
    void **arguments;
};
