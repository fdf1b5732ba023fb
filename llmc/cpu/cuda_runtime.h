// cuda_runtime.h: the part of the CUDA runtime that this project uses, on a CPU without any
// GPU.
//
// Names, signatures and error codes are CUDA's. Other calls do not compile. It is stricter
// than CUDA: it refuses stream 0 for kernels and asynchronous work, tells host and device
// pointers apart, and checks every range.
//   allocation.h       memory
//   stream.h           queues
//   fibre.h, warp.h    threads
//   vectors.h          the exponential
#ifndef LLMC_CPU_CUDA_RUNTIME_H
#define LLMC_CPU_CUDA_RUNTIME_H

#include "launch.h"
#include "vectors.h"

#define __global__ __attribute__((always_inline)) inline
#define __device__
#define __host__
#define __shared__ static thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define UNROLL
#define ROLLED

enum cudaDataType { CUDA_R_32F = 0, CUDA_R_16BF = 14 };
enum cudaMemcpyKind {
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice
};
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };

struct cudaDeviceProp {
    char name[256];
    int major, minor;  // compute capability
};

// Remembers an error for cudaGetLastError, and passes it on.
static inline cudaError_t cpu_error(cudaError_t error) {
    if (error != cudaSuccess && error != cudaErrorNotReady)
        cpu_runtime().last_error = error;
    return error;
}
// Returns the last error once. A refused launch shows up here and nowhere else: no
// synchronisation reports it.
static inline cudaError_t cudaGetLastError() {
    return std::exchange(cpu_runtime().last_error, cudaSuccess);
}

// --------------------------------------------------------------------------------- device

// Returns 1, or with CPU_NO_DEVICE=1 the error of a machine without a GPU or its driver.
static inline cudaError_t cudaGetDeviceCount(int *count) {
    return *count = !getenv("CPU_NO_DEVICE"),
           cpu_error(*count ? cudaSuccess : cudaErrorNoDevice);
}
static inline cudaError_t cudaGetDevice(int *device) {
    return *device = 0, cudaSuccess;
}
static inline cudaError_t cudaSetDevice(int device) {
    return cpu_error(device ? cudaErrorInvalidDevice : cudaSuccess);
}
static inline cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device) {
    if (device || getenv("CPU_NO_DEVICE"))
        return cpu_error(device ? cudaErrorInvalidDevice : cudaErrorNoDevice);
    strcpy(prop->name, "CPU (stand-in)");
    if (cpu_clock().on)
        snprintf(prop->name, sizeof prop->name, "%.63s (virtual time)",
                 cpu_clock().cluster.name);
    prop->major = 9;
    prop->minor = 0;
    return cudaSuccess;
}
static inline cudaError_t cudaDeviceSynchronize() {
    cpu_drain(0);
    cpu_check_fences();
    for (cudaStream_t s : cpu_runtime().streams) cpu_clock_host_waits(s->times.now);
    return cudaSuccess;
}

// -------------------------------------------------------------------------------- streams

// Returns a range of priorities, which change nothing here.
static inline cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    return *least = 0, *greatest = -5, cudaSuccess;
}
static inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags,
                                                       int) {
    CpuRuntime &r = cpu_runtime();
    stall_patience();  // a wrong setting ends the program early
    if (r.streams.size() == CPU_MAX_STREAMS) return cpu_error(cudaErrorMemoryAllocation);
    r.streams.push_back(*stream = new CUstream_st{{}, flags, {}, NULL});
    (*stream)->times.last.stream = (unsigned)r.streams.size();
    return cudaSuccess;
}
static inline cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithPriority(stream, 0, 0);
}

static inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (!cpu_is_stream(stream)) return cpu_error(cudaErrorInvalidResourceHandle);
    cpu_run_until([=] { return stream->queue.empty(); });
    cpu_clock_host_waits(stream->times.now);
    return cudaSuccess;
}
// Completes at most one operation, so that a loop over queries ends. On the virtual clock
// such a loop is a synchronisation: success moves the host's time.
static inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
    if (!cpu_is_stream(stream)) return cpu_error(cudaErrorInvalidResourceHandle);
    if (stream->queue.empty()) return cpu_clock_host_waits(stream->times.now), cudaSuccess;
    cpu_try_one();
    return cudaErrorNotReady;
}

// --------------------------------------------------------------------------------- events

static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    cpu_runtime().events.insert(*event = new CUevent_st{nullptr, flags});
    return cudaSuccess;
}
static inline cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, 0);
}
static inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = 0) {
    if (!cpu_is_event(event)) return cpu_error(cudaErrorInvalidResourceHandle);
    std::shared_ptr<CpuRecord> record = event->last = std::make_shared<CpuRecord>();
    double host = cpu_clock().host;
    record->stream = stream;
    cpu_enqueue(stream, "cudaEventRecord", [record, stream, host] {
        record->moment = cpu_clock_record(&stream->times, host);
        if (!cpu_clock().on) record->moment.ns = cpu_ns(seconds_wall());
        return record->done = true;
    });
    return cudaSuccess;
}
// Waits for the record that the event holds now; never recorded, it is no wait.
static inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                              unsigned = 0) {
    if (!cpu_is_event(event)) return cpu_error(cudaErrorInvalidResourceHandle);
    cpu_check_enqueue(stream, "cudaStreamWaitEvent");
    std::shared_ptr<CpuRecord> record = event->last;
    if (!record) return cudaSuccess;
    stream->origin = record->stream;
    cpu_enqueue(stream, "cudaStreamWaitEvent", [record, stream] {
        if (record->done && cpu_clock().on) cpu_clock_wait(&stream->times, record->moment);
        return record->done;
    });
    return cudaSuccess;
}
static inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (!cpu_is_event(event)) return cpu_error(cudaErrorInvalidResourceHandle);
    std::shared_ptr<CpuRecord> record = event->last;
    cpu_run_until([=] { return !record || record->done; });
    if (record) cpu_clock_host_waits(record->moment.ns);
    return cudaSuccess;
}
// Completes at most one operation. The answer depends on this machine's speed, so it does
// not move the virtual clock.
static inline cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (!cpu_is_event(event)) return cpu_error(cudaErrorInvalidResourceHandle);
    if (!event->last || event->last->done) return cudaSuccess;
    cpu_try_one();
    return cudaErrorNotReady;
}
static inline cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start,
                                               cudaEvent_t end) {
    if (!cpu_is_event(start) || !cpu_is_event(end) || !start->last || !end->last ||
        ((start->flags | end->flags) & cudaEventDisableTiming))
        return cpu_error(cudaErrorInvalidResourceHandle);
    if (!start->last->done || !end->last->done) return cudaErrorNotReady;
    *ms = (float)(1e-6 * (end->last->moment.ns - start->last->moment.ns));
    return cudaSuccess;
}
static inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    if (!cpu_is_event(event)) return cpu_error(cudaErrorInvalidResourceHandle);
    cpu_runtime().events.erase(event);
    delete event;
    return cudaSuccess;
}

// --------------------------------------------------------------------------------- memory

// Returns the bytes of this machine, and stores those that are unused.
static inline size_t cpu_machine_memory(size_t *unused) {
    size_t machine = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    FILE *f = fopen("/proc/meminfo", "r");
    *unused = machine;
    if (f) {
        char line[128];
        size_t kib;
        while (fgets(line, sizeof line, f))
            if (sscanf(line, "MemAvailable: %zu kB", &kib) == 1) *unused = kib << 10;
        fclose(f);
    }
    return machine;
}

// Returns the bytes of the "device": CPU_DEVICE_MEMORY (in MiB) or the machine's memory, or
// in a simulation the memory of the cluster's device. Available is the rest of both.
static inline cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    size_t unused, machine = cpu_machine_memory(&unused);
    double limit = environment_number("CPU_DEVICE_MEMORY", 0);
    *total = limit > 0 ? (size_t)(limit * (1 << 20)) : machine;
    if (cpu_simulates())
        unused = *total =
            (size_t)(cpu_clock().cluster.memory - cpu_clock().cluster.reserve);
    size_t used = cpu_memory().device_bytes, left = *total > used ? *total - used : 0;
    *available = std::min(left, unused);
    return cudaSuccess;
}

// Returns the bytes that may still be pinned. The limit is CPU_HOST_MEMORY (in MiB).
// Without it, it is the machine's unused memory, or in a simulation a device's share of its
// node's memory.
static inline size_t cpu_host_memory() {
    const Cluster *c = &cpu_clock().cluster;
    size_t unused, used = cpu_memory().host_bytes;
    cpu_machine_memory(&unused);
    double limit = environment_number("CPU_HOST_MEMORY", 0) * (1 << 20);
    if (limit <= 0 && !cpu_simulates()) return unused;
    if (limit <= 0) limit = c->host_memory > 0 ? c->host_memory / c->gpus_per_node : 1e18;
    size_t left = (size_t)limit > used ? (size_t)limit - used : 0;
    return cpu_simulates() ? left : std::min(left, unused);
}

static inline cudaError_t cpu_malloc(void **p, size_t bytes, bool device) {
    *p = NULL;
    if (bytes == 0) return cudaSuccess;
    size_t available = 0, total;
    if (device)
        cudaMemGetInfo(&available, &total);
    else
        available = cpu_host_memory();
    if (bytes > available || !(*p = cpu_allocate(bytes, device)))
        return cpu_error(cudaErrorMemoryAllocation);
    return cudaSuccess;
}
template <class T>
static inline cudaError_t cudaMalloc(T **p, size_t bytes) {
    return cpu_malloc((void **)p, bytes, true);
}
template <class T>
static inline cudaError_t cudaMallocHost(T **p, size_t bytes) {
    return cpu_malloc((void **)p, bytes, false);
}

// Frees after all queued work.
static inline cudaError_t cpu_free(void *p, bool device) {
    if (!p) return cudaSuccess;
    cpu_drain(0);
    return cpu_error(cpu_release(p, device) ? cudaSuccess : cudaErrorInvalidValue);
}
static inline cudaError_t cudaFree(void *p) {
    return cpu_free(p, true);
}
static inline cudaError_t cudaFreeHost(void *p) {
    return cpu_free(p, false);
}

// Checks that both ranges are valid and of the kind's direction.
static inline cudaError_t cpu_check_copy(const void *to, const void *from, size_t bytes,
                                         cudaMemcpyKind kind) {
    CpuPlace target = cpu_place(to, bytes), source = cpu_place(from, bytes);
    if (!to || !from || target == CPU_NOWHERE || source == CPU_NOWHERE)
        return cudaErrorInvalidValue;
    bool fits = target == (kind == cudaMemcpyDeviceToHost ? CPU_HOST : CPU_DEVICE) &&
                source == (kind == cudaMemcpyHostToDevice ? CPU_HOST : CPU_DEVICE);
    return fits ? cudaSuccess : cudaErrorInvalidMemcpyDirection;
}

// Enqueues a copy, which reads its source late, even from pageable memory: keep it until
// then.
static inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes,
                                          cudaMemcpyKind kind, cudaStream_t stream = 0) {
    if (bytes == 0) return cudaSuccess;
    cudaError_t error = cpu_check_copy(to, from, bytes, kind);
    if (error != cudaSuccess) return cpu_error(error);
    bool inside = kind == cudaMemcpyDeviceToDevice;
    cpu_state_bytes(inside ? KERNEL_ELEMENTWISE : KERNEL_COPY,
                    (inside ? 2.0 : 1.0) * (double)bytes);
    cpu_enqueue_work(stream, "cudaMemcpyAsync", [=] { cpu_copy(to, from, bytes); });
    return cudaSuccess;
}
static inline cudaError_t cudaMemsetAsync(void *p, int byte, size_t bytes,
                                          cudaStream_t stream = 0) {
    if (bytes == 0) return cudaSuccess;
    if (!cpu_is_device_range(p, bytes)) return cpu_error(cudaErrorInvalidValue);
    cpu_state_bytes(KERNEL_ELEMENTWISE, (double)bytes);
    cpu_enqueue_work(stream, "cudaMemsetAsync", [=] { cpu_fill(p, byte, bytes); });
    return cudaSuccess;
}
// Waits for all blocking streams, then runs the work at once, with device memory open.
template <class Work>
static inline cudaError_t cpu_at_once(KernelKind kind, size_t bytes, Work work) {
    cpu_drain(cudaStreamNonBlocking);
    cpu_state_bytes(kind, (double)bytes);
    cpu_clock_host_works(cpu_take_cost().ns);
    if (cpu_simulates()) return cudaSuccess;
    bool before = cpu_open_memory(true);
    work();
    cpu_open_memory(before);
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes,
                                     cudaMemcpyKind kind) {
    if (bytes == 0) return cudaSuccess;
    cudaError_t error = cpu_check_copy(to, from, bytes, kind);
    if (error != cudaSuccess) return cpu_error(error);
    return cpu_at_once(KERNEL_COPY, bytes, [=] { cpu_copy(to, from, bytes); });
}
static inline cudaError_t cudaMemset(void *p, int byte, size_t bytes) {
    if (bytes == 0) return cudaSuccess;
    if (!cpu_is_device_range(p, bytes)) return cpu_error(cudaErrorInvalidValue);
    return cpu_at_once(KERNEL_ELEMENTWISE, bytes, [=] { cpu_fill(p, byte, bytes); });
}

#endif
