/* A stand-in for NVIDIA's driver library: it records each call, and returns what the test wants.
 *
 * It is compiled against CUDA's own header, so the compiler checks names and types here. The test then checks that the
 * arguments which arrive are the ones that Python passed. */

#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

_Static_assert(CUDA_ERROR_NOT_READY == NOT_READY, "");
_Static_assert(CU_EVENT_DISABLE_TIMING == EVENT_DISABLE_TIMING, "");
_Static_assert(CU_IPC_HANDLE_SIZE == HANDLE_BYTES, "");
_Static_assert(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS == IPC_LAZY_ENABLE_PEER_ACCESS, "");
_Static_assert(CU_MEMHOSTREGISTER_PORTABLE == HOST_PORTABLE, "");
_Static_assert(CU_MEMHOSTREGISTER_DEVICEMAP == HOST_DEVICEMAP, "");
_Static_assert(CU_MEMHOSTREGISTER_READ_ONLY == HOST_READ_ONLY, "");
_Static_assert(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE == POINTER_IS_LEGACY_CUDA_IPC_CAPABLE, "");
_Static_assert(CU_STREAM_NON_BLOCKING == STREAM_NON_BLOCKING, "");

/* What the test reads and writes. */
char fake_log[1 << 16];
char fake_failing[64];  /* the function that fails */
int fake_status;        /* with this CUresult */
int fake_pending;       /* queries of events that find work */
int fake_num_arguments; /* of a kernel */
bool fake_has_handles = true;

static CUresult called(const char *name, const char *format, ...) {
    int (*holds_gil)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
    char *end = fake_log + strlen(fake_log);
    end += sprintf(end, "%s %s", name, holds_gil() ? "held" : "released");
    va_list arguments;
    va_start(arguments, format);
    end += vsprintf(end, format, arguments);
    va_end(arguments);
    strcpy(end, "\n");
    return strcmp(name, fake_failing) ? CUDA_SUCCESS : (CUresult)fake_status;
}

#define HEX(value) ((unsigned long long)(value))
#define CALLED(format, ...) called(__func__, format, __VA_ARGS__)

CUresult cuInit(unsigned int flags) { return CALLED(" %u", flags); }

CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
            : error == CUDA_ERROR_NO_DEVICE   ? "CUDA_ERROR_NO_DEVICE"
                                              : NULL;
    called(__func__, "");
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = 40 + ordinal; return CALLED(" %d", ordinal); }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)(0xC000000000000000 + (unsigned long long)device);
    return CALLED(" %d", device);
}

CUresult cuCtxSetCurrent(CUcontext context) { return CALLED(" %llx", HEX(context)); }
CUresult cuCtxPushCurrent_v2(CUcontext context) { return CALLED(" %llx", HEX(context)); }
CUresult cuCtxPopCurrent_v2(CUcontext *context) { *context = NULL; return called(__func__, ""); }

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t nbytes) {
    *address = 0xFEDCBA9876543210;
    return CALLED(" %zx", nbytes);
}

CUresult cuMemFree_v2(CUdeviceptr address) { return CALLED(" %llx", HEX(address)); }

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    *base = address & ~0xFFFFFULL;
    *size = 1ULL << 41;
    return CALLED(" %llx", HEX(address));
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    *(bool *)data = fake_has_handles;
    return CALLED(" %d %llx", attribute, HEX(address));
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    for (int i = 0; i < 64; i++) handle->reserved[i] = (char)(3 * i);
    return CALLED(" %llx", HEX(address));
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
    char text[129];
    for (int i = 0; i < 64; i++) sprintf(text + 2 * i, "%02x", (unsigned char)handle.reserved[i]);
    *address = 0xABCDEF0123456789;
    return CALLED(" %s %u", text, flags);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) { return CALLED(" %llx", HEX(address)); }

CUresult cuMemHostRegister_v2(void *address, size_t nbytes, unsigned int flags) {
    return CALLED(" %llx %zx %u", HEX(address), nbytes, flags);
}

CUresult cuMemHostUnregister(void *address) { return CALLED(" %llx", HEX(address)); }

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t nbytes, CUstream stream) {
    return CALLED(" %llx %llx %zx %llx", HEX(to), HEX(from), nbytes, HEX(stream));
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t nbytes, CUstream stream) {
    for (size_t i = 0; i < nbytes; i++) ((char *)to)[i] = (char)i;
    return CALLED(" %llx %zx %llx", HEX(from), nbytes, HEX(stream));
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
    *stream = (CUstream)0x5000000000000001;
    return CALLED(" %u", flags);
}

CUresult cuStreamSynchronize(CUstream stream) { return CALLED(" %llx", HEX(stream)); }
CUresult cuStreamDestroy_v2(CUstream stream) { return CALLED(" %llx", HEX(stream)); }

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    return CALLED(" %llx %llx %u", HEX(stream), HEX(event), flags);
}

CUresult cuEventCreate(CUevent *event, unsigned int flags) {
    *event = (CUevent)0xE000000000000001;
    return CALLED(" %u", flags);
}

CUresult cuEventDestroy_v2(CUevent event) { return CALLED(" %llx", HEX(event)); }
CUresult cuEventRecord(CUevent event, CUstream stream) { return CALLED(" %llx %llx", HEX(event), HEX(stream)); }
CUresult cuEventSynchronize(CUevent event) { return CALLED(" %llx", HEX(event)); }

CUresult cuEventQuery(CUevent event) {
    CUresult status = CALLED(" %llx", HEX(event));
    return status ? status : fake_pending-- > 0 ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared,
                        CUstream stream, void **arguments, void **extra) {
    char text[1024] = "";
    for (int i = 0; i < fake_num_arguments; i++) sprintf(text + strlen(text), " %lld", *(long long *)arguments[i]);
    return CALLED(" %llx %u,%u,%u %u,%u,%u %u %llx %llx:%s", HEX(function), grid_x, grid_y, grid_z, block_x, block_y,
                  block_z, shared, HEX(stream), HEX(extra), text);
}
