/*
 * The CUDA driver for examples, opened at run time, so that neither a toolkit nor a driver is needed to build them.
 */
#ifndef CUDA_DRIVER_H
#define CUDA_DRIVER_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "flashcore.h"

/* What is used of the driver. */
typedef unsigned long long device_address;
typedef struct {
    int (*cuInit)(unsigned);
    int (*cuDeviceGet)(int *, int);
    int (*cuDevicePrimaryCtxRetain)(void **, int);
    int (*cuCtxSetCurrent)(void *);
    int (*cuCtxSynchronize)(void);
    int (*cuMemAlloc_v2)(device_address *, size_t);
    int (*cuMemFree_v2)(device_address);
    int (*cuMemAllocHost_v2)(void **, size_t);
    int (*cuMemFreeHost)(void *);
    int (*cuMemcpyHtoD_v2)(device_address, const void *, size_t);
    int (*cuMemcpyDtoH_v2)(void *, device_address, size_t);
    int (*cuMemcpyDtoHAsync_v2)(void *, device_address, size_t, void *);
    int (*cuMemsetD8Async)(device_address, unsigned char, size_t, void *);
    int (*cuStreamCreate)(void **, unsigned);
    int (*cuStreamDestroy_v2)(void *);
    int (*cuStreamSynchronize)(void *);
    int (*cuStreamBeginCapture_v2)(void *, int);
    int (*cuStreamEndCapture)(void *, void **);
    int (*cuGraphInstantiateWithFlags)(void **, void *, unsigned long long);
    int (*cuGraphLaunch)(void *, void *);
    int (*cuGraphExecDestroy)(void *);
    int (*cuGraphDestroy)(void *);
} driver_t;

static driver_t driver;
static void *context;

static _Noreturn void fail(const char *what, int code)
{
    printf("%s failed with %d: %s\n", what, code, flashcore_last_error());
    exit(4);
}

static void check(const char *what, int code)
{
    if (code != 0)
        fail(what, code);
}

/* Opens the driver, or says that there is no GPU. */
static int open_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        printf("no GPU: %s\n", dlerror());
        return 0;
    }
#define FIND(name) \
    do { \
        *(void **)(&driver.name) = dlsym(library, #name); \
        if (!driver.name) { \
            printf("no GPU: the driver has no %s\n", #name); \
            return 0; \
        } \
    } while (0)
    FIND(cuInit);
    FIND(cuDeviceGet);
    FIND(cuDevicePrimaryCtxRetain);
    FIND(cuCtxSetCurrent);
    FIND(cuCtxSynchronize);
    FIND(cuMemAlloc_v2);
    FIND(cuMemFree_v2);
    FIND(cuMemAllocHost_v2);
    FIND(cuMemFreeHost);
    FIND(cuMemcpyHtoD_v2);
    FIND(cuMemcpyDtoH_v2);
    FIND(cuMemcpyDtoHAsync_v2);
    FIND(cuMemsetD8Async);
    FIND(cuStreamCreate);
    FIND(cuStreamDestroy_v2);
    FIND(cuStreamSynchronize);
    FIND(cuStreamBeginCapture_v2);
    FIND(cuStreamEndCapture);
    FIND(cuGraphInstantiateWithFlags);
    FIND(cuGraphLaunch);
    FIND(cuGraphExecDestroy);
    FIND(cuGraphDestroy);
#undef FIND
    int device;
    int code = driver.cuInit(0);
    if (code == 0)
        code = driver.cuDeviceGet(&device, 0);
    if (code == 0)
        code = driver.cuDevicePrimaryCtxRetain(&context, device);
    if (code == 0)
        code = driver.cuCtxSetCurrent(context);
    if (code != 0)
        printf("no GPU: the driver answers %d\n", code);
    return code == 0;
}

#endif
