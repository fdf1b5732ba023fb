// offload.cuh: the parts of train_offload beside its streams. These are its flag, the bytes and
// copies of a layer's tensors, host memory, and the share of tokens whose copies hide behind
// compute.
// lesson: offload
//
// defines: OffloadRow, OFFLOAD_ROWS, Offload, OFFLOAD_OPTIONS, OFFLOAD_OPTION_ROWS, offload_check,
//          offload_bytes, offload_copy, offload_plan, offload_seconds, offload_choose,
//          offload_allocate
#ifndef LLMC_OFFLOAD_CUH
#define LLMC_OFFLOAD_CUH

#include "llmc/trainer/ranks.cuh"

// A tensor of a layer on its way to the host or back.
struct OffloadRow {
    void *device;
    size_t bytes;        // of a token; 0: it stays
    bool whole = false;  // all tokens travel, whatever the share is
};

enum { OFFLOAD_ROWS = 13 };

struct Offload {
    const char *text;   // of --offload
    double share;       // of the tokens, 0 to 1
    bool measured;      // --offload auto: the share is found before training
    size_t tokens;      // N of a micro-batch
    size_t moved;       // of these, the first ones, whose activations all travel
    size_t layers;      // that travel
    double kept, rest;  // bytes of a layer: always on the host; of all tokens beside these
    char *host;         // pinned: the layers, one behind the other
};

static const Field OFFLOAD_OPTIONS[] = {
    {"Offloading", FIELD_TITLE, 0, NULL, 0, 0, OPTION_BASIC, NULL, NULL},
    {"offload", FIELD_TEXT, offsetof(Offload, text), "auto", 1, 0, OPTION_BASIC, "A|auto",
     "share of tokens whose activations wait on the host; auto: as many as hide"},
};
enum { OFFLOAD_OPTION_ROWS = sizeof OFFLOAD_OPTIONS / sizeof OFFLOAD_OPTIONS[0] };

// Reads the flag's text. Refuses a bad one, a cluster without a host bandwidth and a kind of
// recomputation that leaves nothing to copy.
static inline bool offload_check(Offload *o, int recompute, Error *err) {
    const Field number = {"offload", FIELD_REAL, offsetof(Offload, share), NULL, 0, 1, 0,
                          NULL,      NULL};
    o->measured = strcmp(o->text, "auto") == 0;
    if (!o->measured && !field_set(o, &number, o->text))
        return error_set(err, "--offload must be a number from 0 to 1, or auto, not '%s'",
                         o->text);
#ifdef CPU_CLOCK
    if (cpu_clock().on && cpu_clock().cluster.host_bandwidth == 0)
        return error_set(err,
                         "%s has no \"host_bandwidth\", the bytes/s between a device and "
                         "host memory: --offload needs it",
                         cpu_clock().cluster.name);
#endif
    return recompute != RECOMPUTE_LAYER ||
           error_set(err, "--recompute layer leaves nothing but inputs of layers to copy: use "
                          "--offload 0, which computes all but attention again");
}

// Returns the bytes of a layer on the host, if `moved` of its tokens travel. A tensor marked
// `whole` travels with all its tokens.
static inline size_t offload_bytes(const OffloadRow *rows, size_t tokens, size_t moved) {
    size_t bytes = 0;
    for (size_t i = 0; i < OFFLOAD_ROWS; i++)
        bytes += rows[i].bytes * (rows[i].whole ? tokens : moved);
    return bytes;
}

// Queues the copies of layer l to the host, or back.
static inline void offload_copy(const Offload *o, size_t l, const OffloadRow *rows,
                                cudaMemcpyKind kind, cudaStream_t stream) {
    char *host = o->host + l * offload_bytes(rows, o->tokens, o->moved);
    bool leaves = kind == cudaMemcpyDeviceToHost;
    for (size_t i = 0; i < OFFLOAD_ROWS; i++) {
        size_t bytes = rows[i].bytes * (rows[i].whole ? o->tokens : o->moved);
        void *to = leaves ? host : rows[i].device, *from = leaves ? rows[i].device : host;
        if (bytes) CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, kind, stream));
        host += bytes;
    }
}

// Returns the bytes of host memory that may still be pinned.
static inline size_t host_memory_free(void) {
#ifdef CPU_CLOCK
    return cpu_host_memory();
#else
    size_t kib = 0;
    char line[128];
    FILE *f = fopen("/proc/meminfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %zu kB", &kib) == 1) break;
    if (f) fclose(f);
    return kib << 10;
#endif
}

static inline double offload_host_mib(const Offload *o) {
    return (double)o->layers * (o->kept + o->share * o->rest) / 1048576.0;
}

// Counts the host memory of the layers and prints it. Ends the run if there is less. --offload
// auto takes the largest share that there is room for.
static inline void offload_plan(Trainer *m, Offload *o, const OffloadRow *rows) {
    Error err;
    double layers = (double)o->layers, room = (double)host_memory_free();
    o->tokens = m->B * m->T;
    o->kept = (double)offload_bytes(rows, o->tokens, 0);
    o->rest = (double)offload_bytes(rows, o->tokens, o->tokens) - o->kept;
    if (o->measured) o->share = 1;
    if (o->measured && layers > 0)
        o->share = fmin(1, fmax(0, (room / layers - o->kept) / o->rest));
    bool fits = layers * (o->kept + o->share * o->rest) <= room ||
                error_set(&err,
                          "does not fit: %.0f MiB of host memory are needed for activations "
                          "and %.0f MiB are free; lower --micro-batch%s",
                          offload_host_mib(o), room / 1048576.0,
                          o->share > 0 ? " or --offload" : "");
    job_agree(&m->job, fits, &err);
    printf("%-12s %12.1f MiB%s\n", "pinned host", offload_host_mib(o),
           o->measured ? " at most" : "");
}

// Returns the seconds of work(), which is queued on the stream. Runs it twice, because the first
// time loads kernels.
template <class Work>
static inline double offload_seconds(cudaStream_t stream, Work work) {
    cudaEvent_t begin, end;
    float ms;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    work();
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaEventRecord(begin, stream));
    work();
    CUDA_CHECK(cudaEventRecord(end, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    return 1e-3 * (double)ms;
}

// Lowers the share until the copies take as long as a layer's forward, `seconds`. The first tensor
// that travels measures the bandwidth.
static inline void offload_choose(Offload *o, const OffloadRow *rows, double seconds,
                                  cudaStream_t stream) {
    size_t bytes = rows[0].bytes * o->tokens;
    void *host;
    CUDA_CHECK(cudaMallocHost(&host, bytes));
    double copying = offload_seconds(stream, [&] {
        CUDA_CHECK(cudaMemcpyAsync(host, rows[0].device, bytes, cudaMemcpyDeviceToHost, stream));
    });
    CUDA_CHECK(cudaFreeHost(host));
    double bandwidth = (double)bytes / copying;
    o->share = fmin(o->share, fmax(0, (seconds * bandwidth - o->kept) / o->rest));
    printf("offload      %.3f of the tokens: a layer's forward takes %.3f ms, and copies "
           "%.3f GB/s; %.1f MiB pinned\n",
           o->share, 1e3 * seconds, 1e-9 * bandwidth, offload_host_mib(o));
}

// Takes the host memory, or ends the run.
static inline void offload_allocate(Trainer *m, Offload *o, const OffloadRow *rows) {
    Error err;
    // Packs of 16 bytes begin at every 8th token, however many channels there are.
    o->moved = o->share < 1 ? (size_t)(o->share * (double)o->tokens) / 8 * 8 : o->tokens;
    size_t bytes = o->layers * offload_bytes(rows, o->tokens, o->moved);
    cudaError_t error = cudaMallocHost((void **)&o->host, bytes);
    bool fits = error == cudaSuccess ||
                error_set(&err, "cannot pin %.0f MiB of host memory: %s",
                          (double)bytes / 1048576.0, cudaGetErrorString(error));
    job_agree(&m->job, fits, &err);
}

#endif
