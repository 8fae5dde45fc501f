/* NVIDIA's management library for a machine without a GPU. It has the functions that PyTorch and elastic-run call, and
 * answers from FAKE_GPUS, a list of UUIDs. An empty UUID is a GPU that has fallen off the bus. `FAKE_GPUS=broken` is a
 * driver that does not work. Numbers and signatures are those of nvml.h of CUDA 12. */

#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };

static const char *uuids(void) {
    const char *given = getenv("FAKE_GPUS");
    return given ? given : "";
}

/* The UUID of a GPU, and its length up to the next comma. */
static const char *uuid(unsigned index, size_t *length) {
    const char *at = uuids();
    for (; index > 0; index--)
        at = strchr(at, ',') + 1;
    *length = strcspn(at, ",");
    return at;
}

static unsigned count(void) {
    const char *at = uuids();
    unsigned commas = 0;
    for (const char *c = at; *c; c++)
        commas += *c == ',';
    return *at ? commas + 1 : 0;
}

int nvmlInit(void) {
    return strcmp(uuids(), "broken") ? SUCCESS : DRIVER_NOT_LOADED;
}

int nvmlInit_v2(void) {
    return nvmlInit();
}

int nvmlShutdown(void) {
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *number) {
    *number = count();
    return SUCCESS;
}

/* A handle is the index plus one, so that it is not null. */
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    size_t length;
    if (index >= count())
        return INVALID_ARGUMENT;
    uuid(index, &length);
    *device = (void *)((size_t)index + 1);
    return length ? SUCCESS : GPU_IS_LOST;
}

int nvmlDeviceGetUUID(void *device, char *to, unsigned room) {
    size_t length;
    const char *from = uuid((unsigned)((size_t)device - 1), &length);
    if (length >= room)
        return INSUFFICIENT_SIZE;
    memcpy(to, from, length);
    to[length] = 0;
    return SUCCESS;
}

/* Total, free, used. GPU 0 uses 1 MiB, GPU 1 uses 2 MiB, and so on. */
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    memory[0] = 1ull << 30;
    memory[2] = (size_t)device << 20;
    memory[1] = memory[0] - memory[2];
    return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *to, unsigned room) {
    if (room < sizeof "1.2.3")
        return INSUFFICIENT_SIZE;
    memcpy(to, "1.2.3", sizeof "1.2.3");
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *number) {
    (void)device;
    *number = 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **part) {
    (void)device, (void)index, (void)part;
    return NOT_FOUND;
}
