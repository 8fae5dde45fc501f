/* NVIDIA's management library for a machine without a GPU. It has the functions that PyTorch and elastic-run call, and
 * answers from FAKE_GPUS, a list of UUIDs. An empty UUID is a GPU that has fallen off the bus. `FAKE_GPUS=broken` is a
 * driver that does not work. The file that FAKE_GPU_FAULTS names may come later: it has lines `field GPU ID NUMBER`, `xid GPU
 * NUMBER`, `lost GPU 0`, `mute GPU 0` (lost, but its handle is known), and
 * `hangs 0 0`. Numbers and signatures are those of nvml.h of CUDA 12. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15 };
enum { UNSIGNED_INT = 1, XID_EVENT = 8 };

/* The number of lines of this kind about this GPU, and the last two numbers of the one of this index. */
static unsigned faults(const char *kind, unsigned gpu, unsigned index, unsigned *first, unsigned *last) {
    const char *path = getenv("FAKE_GPU_FAULTS");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[128], named[16];
    unsigned found = 0, about, a, b = 0;
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "%15s %u %u %u", named, &about, &a, &b) < 3 || strcmp(named, kind) || about != gpu)
            continue;
        if (found++ == index)
            *first = a, *last = b;
    }
    if (file)
        fclose(file);
    return found;
}

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
    unsigned unused;
    while (faults("hangs", 0, 0, &unused, &unused))
        pause();
    if (index >= count())
        return INVALID_ARGUMENT;
    uuid(index, &length);
    *device = (void *)((size_t)index + 1);
    return length && !faults("lost", index, 0, &unused, &unused) ? SUCCESS : GPU_IS_LOST;
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

struct field {
    unsigned id, scope;
    long long time, latency;
    int type, result;
    union { unsigned number; unsigned long long wide; } value;
};

int nvmlDeviceGetFieldValues(void *device, int number, struct field *fields) {
    for (struct field *field = fields; field < fields + number; field++) {
        unsigned id, value, gpu = (unsigned)((size_t)device - 1), lines = faults("field", gpu, ~0u, &id, &value);
        field->result = faults("mute", gpu, 0, &id, &value) ? GPU_IS_LOST : NOT_SUPPORTED;
        for (unsigned index = 0; index < lines; index++) {
            faults("field", gpu, index, &id, &value);
            if (id == field->id)
                field->result = SUCCESS, field->type = UNSIGNED_INT, field->value.number = value;
        }
    }
    return SUCCESS;
}

/* The events of one GPU, from those on that it had not had when it was registered. */
struct events {
    size_t device;
    unsigned told;
};

int nvmlEventSetCreate(struct events **set) {
    *set = calloc(1, sizeof **set);
    return SUCCESS;
}

int nvmlEventSetFree(struct events *set) {
    free(set);
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(void *device, unsigned long long kinds, struct events *set) {
    unsigned unused;
    if (kinds != XID_EVENT)
        return NOT_SUPPORTED;
    set->device = (size_t)device;
    set->told = faults("xid", (unsigned)(set->device - 1), 0, &unused, &unused);
    return SUCCESS;
}

struct event {
    void *device;
    unsigned long long kind, data;
    unsigned instance, compute;
};

int nvmlEventSetWait_v2(struct events *set, struct event *event, unsigned limit_ms) {
    unsigned xid, unused;
    if (faults("mute", (unsigned)(set->device - 1), 0, &unused, &unused))
        return GPU_IS_LOST;
    if (limit_ms || faults("xid", (unsigned)(set->device - 1), set->told, &xid, &unused) <= set->told)
        return TIMEOUT;
    *event = (struct event){(void *)set->device, XID_EVENT, xid, ~0u, ~0u};
    set->told++;
    return SUCCESS;
}
