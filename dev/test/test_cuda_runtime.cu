// test_cuda_runtime.cu: the CPU stand-in of the CUDA runtime: threads, barriers, streams, memory,
// and the report of every misuse. Cases that end the program run in a child of this program.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include <nvtx3/nvToolsExt.h>

#include "dev/test/check.h"
#include "llmc/kernels/packs.cuh"

static Check c;
static cudaStream_t stream;

template <class T>
static T *device(size_t n) {
    T *p;
    CUDA_CHECK(cudaMalloc(&p, n * sizeof(T)));
    return p;
}
template <class T>
static std::vector<T> fetch(const T *p, size_t n) {
    std::vector<T> host(n);
    CUDA_CHECK(cudaMemcpy(host.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
}
static void finish() {
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaGetLastError());
}
template <class T>
static bool same_bits(const std::vector<T> &a, const std::vector<T> &b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}
static Random order_of(const char *name, const char *text) {
    setenv(name, text, 1);
    return environment_random(name, false);
}
static void thread_order(const char *text) {
    cpu_runtime().thread_order = order_of("CPU_THREAD_ORDER", text);
}
static void stream_order(const char *text) {
    cpu_runtime().stream_order = order_of("CPU_STREAM_ORDER", text);
}

// ------------------------------------------------------------------------------- launches

// Counts each thread of the grid once, at its own number.
__global__ void count_threads(int *seen) {
    size_t block = blockIdx.x + gridDim.x * (blockIdx.y + (size_t)gridDim.y * blockIdx.z);
    size_t thread = threadIdx.x + blockDim.x * (threadIdx.y + (size_t)blockDim.y * threadIdx.z);
    int *mine = &seen[block * (blockDim.x * blockDim.y * blockDim.z) + thread];
    __atomic_fetch_add(mine, 1, __ATOMIC_RELAXED);
    __syncthreads();
    __atomic_fetch_add(mine, 10, __ATOMIC_RELAXED);
}

struct Numbers {
    int a[5];
    double b;
};
__global__ void take_arguments(double *out, Numbers numbers, size_t big, float f, bool flag) {
    out[0] = numbers.a[4] + numbers.b;
    out[1] = (double)big;
    out[2] = f;
    out[3] = flag;
}
template <int A, int B>
__global__ void template_sum(int *out) { *out = A + B; }

static void test_launches() {
    const dim3 shapes[][2] = {
        {1, 1}, {7, 33}, {dim3(3, 2, 5), dim3(5, 3, 2)}, {dim3(2, 3), dim3(8, 4, 32)}, {1000, 5}};
    for (const char *order : {"", "random:1", "random:2"}) {
        thread_order(order);
        bool once = true;
        for (auto &shape : shapes) {
            size_t n = (size_t)shape[0].x * shape[0].y * shape[0].z * shape[1].x * shape[1].y *
                       shape[1].z;
            int *seen = device<int>(n);
            CUDA_CHECK(cudaMemsetAsync(seen, 0, n * sizeof(int), stream));
            LAUNCH(count_threads, shape[0], shape[1], stream)(seen);
            finish();
            for (int s : fetch(seen, n)) once &= s == 11;
            CUDA_CHECK(cudaFree(seen));
        }
        check(&c, once, "every thread of ragged and 3-D grids and blocks runs once, order '%s'",
              order);
    }
    thread_order("");

    double *out = device<double>(4);
    Numbers numbers = {{1, 2, 3, 4, 5}, 0.5};
    LAUNCH(take_arguments, 1, 1, stream)(out, numbers, 3, 1, 2);
    numbers.a[4] = 0;  // the launch has its own copy
    finish();
    check(&c, same_bits(fetch(out, 4), {5.5, 3, 1, 1}),
          "arguments are converted and copied at the launch");
    LAUNCH((template_sum<3, 4>), (size_t)1, 1, stream)((int *)out);
    finish();
    check(&c, fetch((int *)out, 1)[0] == 7, "a template with two arguments is launched");
    CUDA_CHECK(cudaFree(out));
}

static void test_refused_launches() {
    int *p = device<int>(1);
    int terminal = dup(2), nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, 2);  // five sentences that are meant to be there
    cudaError_t errors[5];
    const struct {
        size_t grid, block;
    } bad[] = {{0, 1}, {1, 0}, {1, 1025}, {(size_t)1 << 32, 1}};
    for (int i = 0; i < 4; i++) {
        LAUNCH_UNCHECKED((template_sum<1, 1>), bad[i].grid, bad[i].block, stream)(p);
        errors[i] = cudaGetLastError();
    }
    LAUNCH_UNCHECKED((template_sum<1, 1>), dim3(1, 70000), 1, stream)(p);
    bool silent = cudaStreamSynchronize(stream) == cudaSuccess &&
                  cudaDeviceSynchronize() == cudaSuccess &&
                  cudaStreamQuery(stream) == cudaSuccess;
    errors[4] = cudaGetLastError();
    dup2(terminal, 2);
    close(terminal);
    close(nowhere);
    bool invalid = true;
    for (cudaError_t error : errors) invalid &= error == cudaErrorInvalidConfiguration;
    check(&c, invalid, "impossible grids and blocks are refused, 2^32 blocks do not wrap around");
    check(&c, silent && cudaGetLastError() == cudaSuccess,
          "no synchronisation reports a refused launch: cudaGetLastError does, once");
    CUDA_CHECK(cudaFree(p));
}

// ---------------------------------------------------------------------------------- warps

enum { BY_INDEX, UP, XOR };

template <class T>
__global__ void shuffle(T *out, int kind, int by) {
    unsigned thread = threadIdx.x + blockDim.x * threadIdx.y;
    T value = (T)(thread * 3 + 1), got = 0;
    if (kind == BY_INDEX) got = __shfl_sync(0xFFFFFFFFu, value, by);
    if (kind == UP) got = __shfl_up_sync(0xFFFFFFFFu, value, (unsigned)by);
    if (kind == XOR) got = __shfl_xor_sync(0xFFFFFFFFu, value, by);
    out[thread] = got;
}

// Returns the lane that a lane reads, by the words of the CUDA programming guide.
static int shuffle_source(int kind, int lane, int by) {
    if (kind == BY_INDEX) return by % 32;
    return kind == XOR ? lane ^ by : lane - by < 0 ? lane : lane - by;
}

template <class T>
static bool shuffles_agree(dim3 block) {
    size_t threads = (size_t)block.x * block.y;
    T *out = device<T>(threads);
    bool good = true;
    for (int kind = 0; kind < 3; kind++) {
        for (int by : {0, 1, 2, 5, 6, 7, 16, 31}) {
            LAUNCH(shuffle<T>, 1, block, stream)(out, kind, by);
            finish();
            std::vector<T> got = fetch(out, threads);
            for (int i = 0; i < (int)threads; i++) {
                int source = i / 32 * 32 + shuffle_source(kind, i % 32, by);
                good &= got[i] == (T)(source * 3 + 1);
            }
        }
    }
    CUDA_CHECK(cudaFree(out));
    return good;
}

static void test_shuffles() {
    for (const char *order : {"", "random:3"}) {
        thread_order(order);
        bool good = shuffles_agree<int>(32) && shuffles_agree<float>(96) &&
                    shuffles_agree<double>(dim3(16, 8)) && shuffles_agree<unsigned>(1024) &&
                    shuffles_agree<long long>(64);
        check(&c, good, "shuffles of every kind and type, order '%s'", order);
    }
    thread_order("");
}

template <class T> __device__ T by_shuffles(T x, bool sum) {
    for (int offset = 16; offset > 0; offset /= 2) {
        T other = __shfl_xor_sync(0xFFFFFFFFu, x, offset);
        x = sum ? x + other : (T)fmax(x, other);
    }
    return x;
}
// Each thread's six results: of a warp and a block, and the same written out with shuffles and
// barriers.
template <class T>
__global__ void reductions(T *out, const T *in) {
    __shared__ T of_warp[32];
    unsigned thread = threadIdx.x + blockDim.x * threadIdx.y, threads = blockDim.x * blockDim.y;
    T x = in[thread], *mine = out + thread * 8;
    mine[0] = warp_sum(x);
    mine[1] = by_shuffles(x, true);
    mine[2] = warp_max(x);
    mine[3] = by_shuffles(x, false);
    mine[4] = block_sum(x);
    mine[6] = block_max(x);
    for (int k = 0; k < 2; k++) {
        if (thread % 32 == 0) of_warp[thread / 32] = mine[k ? 3 : 1];
        __syncthreads();
        T total = of_warp[0];
        for (unsigned w = 1; w < threads / 32; w++)
            total = k ? (T)fmax(total, of_warp[w]) : total + of_warp[w];
        __syncthreads();
        mine[5 + 2 * k] = total;
    }
}
template <class T>
static bool reductions_agree() {
    bool good = true;
    for (dim3 block : {dim3(32), dim3(256), dim3(16, 6), dim3(1024)}) {
        size_t threads = (size_t)block.x * block.y;
        std::vector<T> host(threads);
        Random random = {true, threads, 0};
        for (T &x : host)
            x = (T)((double)(int64_t)random_next(&random) * 1e-19 * (random_next(&random) % 1000));
        T *in = device<T>(threads), *out = device<T>(threads * 8);
        CUDA_CHECK(cudaMemcpyAsync(in, host.data(), threads * sizeof(T), cudaMemcpyHostToDevice,
                                   stream));
        LAUNCH(reductions<T>, 1, block, stream)(out, in);
        finish();
        std::vector<T> got = fetch(out, threads * 8);
        for (size_t i = 0; i < threads * 8; i += 2)
            good &= memcmp(&got[i], &got[i + 1], sizeof(T)) == 0;
        CUDA_CHECK(cudaFree(in));
        CUDA_CHECK(cudaFree(out));
    }
    return good;
}
static void test_reductions() {
    for (const char *order : {"", "random:4"}) {
        thread_order(order);
        check(&c, reductions_agree<float>(),
              "float warp_sum .. block_max have the bits of shuffles, order '%s'", order);
        check(&c, reductions_agree<double>(),
              "double warp_sum .. block_max have the bits of shuffles, order '%s'", order);
    }
    thread_order("");
}

// ---------------------------------------------------------------------------------- races

// Each thread reads its neighbour's number through shared memory. Without the barrier that is a
// race.
__global__ void neighbour(float *out, bool with_barrier) {
    __shared__ float s[64];
    s[threadIdx.x] = -1;
    __syncthreads();
    s[threadIdx.x] = (float)(threadIdx.x + blockIdx.x);
    if (with_barrier) __syncthreads();
    out[blockIdx.x * 64 + threadIdx.x] = s[(threadIdx.x + 1) % 64];
}

static void test_races() {
    float *out = device<float>(64 * 9);
    std::vector<float> first;
    bool same = true, exposed = false;
    for (const char *order : {"random:1", "random:2", "random:3", "random:4", "random:5", ""}) {
        thread_order(order);
        for (bool with_barrier : {true, false}) {
            LAUNCH(neighbour, 9, 64, stream)(out, with_barrier);
            finish();
            std::vector<float> got = fetch(out, 64 * 9);
            if (first.empty()) first = got;
            if (with_barrier) same &= same_bits(got, first);
            else exposed |= !same_bits(got, first);
        }
    }
    check(&c, same, "a kernel with its barriers has the same bits in every thread order");
    check(&c, exposed, "missing barrier: a forgotten __syncthreads shows in a random thread order");
    CUDA_CHECK(cudaFree(out));
}

// -------------------------------------------------------------------------------- streams

__global__ void add_one(float *x, size_t n) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) x[i] += 1;
}
__global__ void times_two(float *x, size_t n) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) x[i] *= 2;
}

// Two streams work on x in turns, three times; the events between them may be left out.
static float in_turns(const char *order, bool with_events) {
    stream_order(order);
    cudaStream_t other;
    cudaEvent_t done[6];
    float *x = device<float>(100);
    CUDA_CHECK(cudaStreamCreateWithPriority(&other, cudaStreamNonBlocking, 0));
    for (cudaEvent_t &e : done) CUDA_CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    CUDA_CHECK(cudaMemset(x, 0, 100 * sizeof(float)));
    for (int i = 0; i < 6; i++) {
        cudaStream_t s = i % 2 ? other : stream;
        if (with_events && i > 0) CUDA_CHECK(cudaStreamWaitEvent(s, done[i - 1]));
        if (i % 2) LAUNCH(times_two, 1, 128, s)(x, 100);
        else LAUNCH(add_one, 1, 128, s)(x, 100);
        CUDA_CHECK(cudaEventRecord(done[i], s));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    float result = fetch(x, 100)[99];
    for (cudaEvent_t e : done) CUDA_CHECK(cudaEventDestroy(e));
    CUDA_CHECK(cudaFree(x));
    stream_order("");
    return result;
}

static void test_streams() {
    bool same = true, exposed = false;
    for (int seed = 0; seed < 8; seed++) {
        std::string order = "random:" + std::to_string(seed);
        same &= in_turns(order.c_str(), true) == 14;
        exposed |= in_turns(order.c_str(), false) != 14;
    }
    check(&c, same && in_turns("", true) == 14 && in_turns("", false) == 14,
          "events order two streams for every seed");
    check(&c, exposed,
          "stream race: a forgotten cudaStreamWaitEvent shows in a random stream order");

    float *x = device<float>(4), *host;
    CUDA_CHECK(cudaMallocHost(&host, 4 * sizeof(float)));
    for (int i = 0; i < 4; i++) host[i] = 1;
    CUDA_CHECK(cudaMemcpyAsync(x, host, 4 * sizeof(float), cudaMemcpyHostToDevice, stream));
    host[2] = 5;
    CUDA_CHECK(cudaMemcpyAsync(host, x, 2 * sizeof(float), cudaMemcpyDeviceToHost, stream));
    host[0] = 7;
    bool waited = host[0] == 7;
    finish();
    check(&c, waited && host[0] == 7 && fetch(x, 4)[2] == 5,
          "asynchronous copies read the host's memory when they run");

    // A wait is for the record that was there when it was called.
    cudaStream_t other;
    cudaEvent_t event, never;
    CUDA_CHECK(cudaStreamCreate(&other));
    CUDA_CHECK(cudaEventCreate(&event));
    CUDA_CHECK(cudaEventCreate(&never));
    CUDA_CHECK(cudaMemset(x, 0, 4 * sizeof(float)));
    bool later_ran = false;
    CUDA_CHECK(cudaStreamWaitEvent(other, never));
    CUDA_CHECK(cudaEventRecord(event, stream));
    CUDA_CHECK(cudaStreamWaitEvent(other, event));
    cpu_enqueue(stream, "later", [&] { return later_ran = true; });
    CUDA_CHECK(cudaEventRecord(event, stream));
    CUDA_CHECK(cudaStreamSynchronize(other));
    check(&c, !later_ran,
          "a wait is for the record it saw, an unrecorded event for nothing, and no more is run");
    CUDA_CHECK(cudaEventSynchronize(event));
    check(&c, later_ran, "cudaEventSynchronize runs up to the last record");

    int polls = 0;
    cpu_enqueue(stream, "slow", [&] { return ++polls == 5; });
    cpu_enqueue(other, "quick", [&] { return polls > 0; });
    CUDA_CHECK(cudaEventRecord(event, stream));
    bool not_ready =
        cudaEventQuery(event) == cudaErrorNotReady && cudaStreamQuery(stream) == cudaErrorNotReady;
    for (int i = 0; i < 100 && cudaEventQuery(event) == cudaErrorNotReady; i++) {}
    check(&c,
          not_ready && polls == 5 && cudaEventQuery(event) == cudaSuccess &&
              cudaGetLastError() == cudaSuccess,
          "queries report cudaErrorNotReady and get work done");

    cudaEvent_t start;
    CUDA_CHECK(cudaEventCreate(&start));
    float ms = -1;
    CUDA_CHECK(cudaEventRecord(start, stream));
    cpu_enqueue(stream, "sleep", [] { return usleep(20000), true; });
    CUDA_CHECK(cudaEventRecord(event, stream));
    bool early = cudaEventElapsedTime(&ms, start, event) == cudaErrorNotReady;
    finish();
    CUDA_CHECK(cudaEventElapsedTime(&ms, start, event));
    check(&c, early && ms >= 20 && ms < 2000,
          "events measure when the work ran, not when it was enqueued");
    check(&c, cudaEventElapsedTime(&ms, start, never) == cudaErrorInvalidResourceHandle,
          "no time without a record");
    cudaGetLastError();

    nvtxRangePushA("outer");
    nvtxRangePushA("inner");
    bool nested = !strcmp(cpu_current_label(), "inner");
    nvtxRangePop();
    nested = nested && !strcmp(cpu_current_label(), "outer");
    nvtxRangePop();
    check(&c, nested && !*cpu_current_label(), "nvtx ranges nest");
    for (cudaEvent_t e : {event, never, start}) CUDA_CHECK(cudaEventDestroy(e));
    CUDA_CHECK(cudaFree(x));
}

// --------------------------------------------------------------------------------- memory

static void test_memory() {
    const size_t n = 3000000;
    float *x = device<float>(n), *pinned, host[4] = {0};
    CUDA_CHECK(cudaMallocHost(&pinned, 100));
    bool nan = true;
    for (float v : fetch(x, n)) nan &= v != v;
    check(&c, nan && (uintptr_t)x % 256 == 0, "new memory is NaN and aligned");
    CUDA_CHECK(cudaMemset(x, 0, n * sizeof(float)));
    std::vector<float> ones(n, 1.0f);
    CUDA_CHECK(cudaMemcpy(x + 1, ones.data(), (n - 1) * sizeof(float), cudaMemcpyHostToDevice));
    std::vector<float> got = fetch(x, n);
    check(&c, got[0] == 0 && got[1] == 1 && got[n - 1] == 1, "large copies and fills");

    check(&c,
          cpu_is_device_range(x, n * 4) && cpu_is_device_range(x + n - 1, 4) &&
              !cpu_is_device_range(x + n - 1, 5) && !cpu_is_device_range(x + n, 1) &&
              !cpu_is_device_range(pinned, 4) && !cpu_is_device_range(host, 4),
          "device ranges are known");
    const cudaError_t good = cudaSuccess, value = cudaErrorInvalidValue,
                      way = cudaErrorInvalidMemcpyDirection;
    check(&c,
          cudaMemcpy(pinned, x, 16, cudaMemcpyDeviceToHost) == good &&
              cudaMemcpy(x, x + 4, 16, cudaMemcpyDeviceToDevice) == good,
          "legal copies of every kind");
    check(&c,
          cudaMemcpy(host, x, 16, cudaMemcpyHostToDevice) == way &&
              cudaMemcpy(x, x + 4, 16, cudaMemcpyDeviceToHost) == way &&
              cudaMemcpyAsync(x, host, 16, cudaMemcpyDeviceToDevice, stream) == way,
          "copies in the wrong direction");
    check(&c,
          cudaMemcpy(host, x + n - 1, 16, cudaMemcpyDeviceToHost) == value &&
              cudaMemcpy(pinned + 24, x, 16, cudaMemcpyDeviceToHost) == value &&
              cudaMemset(x + 1, 0, n * 4) == value && cudaMemset(host, 0, 4) == value &&
              cudaMemsetAsync(x + n, 0, 4, stream) == value &&
              cudaMemcpy(NULL, x, 4, cudaMemcpyDeviceToHost) == value,
          "copies and fills beyond an allocation");
    const cudaError_t handle = cudaErrorInvalidResourceHandle;
    check(&c,
          cudaEventRecord(NULL, stream) == handle &&
              cudaStreamSynchronize((cudaStream_t)x) == handle,
          "handles that are none");
    check(&c,
          cudaFree(x + 1) == value && cudaFree(host) == value && cudaFree(pinned) == value &&
              cudaFree(NULL) == good,
          "foreign pointers are not freed");
    cudaGetLastError();

    LAUNCH(add_one, CEIL_DIV(n, 256), 256, stream)(x, n);
    bool drained = false;
    cpu_enqueue(stream, "check", [&] { return drained = true; });
    check(&c, cudaFree(x) == good && drained && cudaFree(x) == value,
          "cudaFree waits for queued work; twice is an error");
    check(&c, cudaGetLastError() == value && cudaGetLastError() == good,
          "the last error is kept once");

    size_t before, after, total;
    void *p;
    setenv("CPU_DEVICE_MEMORY", "512", 1);
    CUDA_CHECK(cudaMemGetInfo(&before, &total));
    check(&c, cudaMalloc(&p, total * 2) == cudaErrorMemoryAllocation && cudaGetLastError() != good,
          "cudaMalloc fails");
    check(&c, cudaMalloc(&p, 64 << 20) == good && cudaMemGetInfo(&after, &total) == good &&
                  total == (size_t)512 << 20 && after == before - (64 << 20),
          "allocated memory is not free");
    CUDA_CHECK(cudaFree(p));
    unsetenv("CPU_DEVICE_MEMORY");

    size_t held = cpu_memory().host_bytes, device_held = cpu_memory().device_bytes;
    setenv("CPU_HOST_MEMORY", "64", 1);
    size_t room = cpu_host_memory();
    check(&c,
          room <= ((size_t)64 << 20) - held &&
              cudaMallocHost(&p, room + 1) == cudaErrorMemoryAllocation &&
              cudaMallocHost(&p, 1 << 20) == good && cpu_host_memory() == room - (1 << 20) &&
              cpu_memory().device_bytes == device_held,
          "pinned memory is counted, apart from the device's, and ends");
    check(&c,
          cudaFreeHost(p) == good && cudaFreeHost(p) == value && cpu_memory().host_bytes == held &&
              cudaFreeHost(NULL) == good,
          "cudaFreeHost gives it back once");
    x = device<float>(4);
    check(&c, cudaFreeHost(x) == value && cudaFree(x) == good, "and not the device's");
    unsetenv("CPU_HOST_MEMORY");
    cudaGetLastError();
}

static void test_device() {
    int count = 0, device = -1;
    cudaDeviceProp prop;
    CUDA_CHECK(cudaGetDeviceCount(&count));
    CUDA_CHECK(cudaSetDevice(0));
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&prop, 0));
    check(&c,
          count == 1 && device == 0 && cudaSetDevice(1) == cudaErrorInvalidDevice &&
              !strcmp(prop.name, "CPU (stand-in)"),
          "one device");
    int least, greatest;
    cudaStream_t urgent;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    check(&c,
          prop.major >= 8 && greatest <= least &&
              cudaStreamCreateWithPriority(&urgent, cudaStreamNonBlocking, greatest) == cudaSuccess,
          "capability and stream priorities");
    cudaGetLastError();
}

// ----------------------------------------------------------------------------------- bf16

static float float_of(uint32_t bits) { return cpu_from_bits<float>(bits); }

static void test_bf16() {
    bool exact = true, nearest = true, eight = true;
    for (uint32_t h = 0; h < 65536; h++) {
        float f = __bfloat162float(cpu_from_bits<__nv_bfloat16>(h));
        unsigned short back = __float2bfloat16_rn(f).__x;
        exact &= f != f ? back == 0x7FFF : back == h;
        if ((h & 0x7FFF) >= 0x7F80) continue;
        // Between h and the next: below the middle, the middle (to even), above it.
        const uint32_t next[5] = {h, h + (h & 1), h + 1, h, h + 1};
        const uint32_t low[5] = {0x7FFF, 0x8000, 0x8001, 1, 0xFFFF};
        for (int i = 0; i < 5; i++)
            nearest &= __float2bfloat16_rn(float_of(h << 16 | low[i])).__x == next[i];
    }
    check(&c, exact, "bf16 to float and back is exact for all 65536 values; NaN becomes 0x7FFF");
    check(&c, nearest, "float to bf16 rounds to nearest, ties to even, overflow to infinity");
    bool nan = true;
    for (uint32_t bits : {0x7F800001u, 0xFF800001u, 0x7FFFFFFFu, 0xFFFFFFFFu, 0x7FC00000u})
        nan &= __float2bfloat16_rn(float_of(bits)).__x == 0x7FFF;
    check(&c, nan, "a NaN never rounds to infinity");
    for (uint32_t first = 0; first < 0xFFFFFF00u; first += 7777777) {  // floats of every kind
        float x[8], back[8];
        uint16_t half[8];
        for (uint32_t k = 0; k < 8; k++) x[k] = float_of(first + k * 0x1234567u);
        bf16x8_from_float(half, x);
        bf16x8_to_float(back, half);
        for (int k = 0; k < 8; k++) {
            float one = bf16_to_float(half[k]);
            eight &= half[k] == bf16_from_float(x[k]) && memcmp(&one, &back[k], sizeof one) == 0;
        }
    }
    check(&c, eight, "eight conversions at once give the bits of one by one");
    check(&c,
          to_float(from_float<__nv_bfloat16>(1.00390625f)) == 1.0f &&
              from_float<float>(1.5f) == 1.5f && (float)__nv_bfloat16(-2.0f) == -2.0f,
          "to_float and from_float");
    alignas(16) floatX a[16];
    for (size_t i = 0; i < 16; i++) a[i] = from_float<floatX>((float)i);
    x128 pack = load128(a);
    store128(a + x128::size, pack);
    check(&c, sizeof pack == 16 && to_float(a[2 * x128::size - 1]) == (float)(x128::size - 1),
          "128-bit packs of " FLOATX_NAME);
}

// ----------------------------------------------------------------------------- cases that
// end

__global__ void divergent() {
    if (threadIdx.x == 3) __syncthreads();
    else { __syncthreads(); }
    if (threadIdx.x < 5) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}
__global__ void leaves_early() {
    if (blockIdx.x == 2 && threadIdx.x == 40) return;
    __syncthreads();
}
__global__ void lane_left() {
    if (threadIdx.x == 9) return;
    __shfl_xor_sync(0xFFFFFFFFu, 1.0f, 1);
}
__global__ void warp_against_block() {
    if (threadIdx.x == 9) __syncthreads();
    else warp_sum(1.0f);
}
__global__ void short_block() { warp_sum(1.0f); }
__global__ void part_of_warp() {
    if (threadIdx.x < 16) __shfl_sync(0x0000FFFFu, 1, 0);
}
__global__ void different_operations() {
    if (threadIdx.x < 31) warp_sum(1.0f);
    else warp_max(1.0f);
}
__global__ void misaligned(float *x) { load128(x + threadIdx.x + 1); }
__global__ void writes_at(float *x, size_t i) { x[i] = 1; }

// Reads behind a barrier, so on a stack that was left and resumed.
__global__ void reads_local(float *x, int i) {
    float local[4] = {1.0f, 2.0f, 3.0f, 4.0f}, *elements = local;
    __syncthreads();
    x[threadIdx.x] = elements[i];
}

static int run_case(const char *name) {
    std::string n = name;
    CUDA_CHECK(cudaStreamCreate(&stream));
    float *x = device<float>(10);
    if (n == "divergent") LAUNCH(divergent, 3, dim3(4, 4, 2), stream)();
    if (n == "exit") LAUNCH(leaves_early, 3, 64, stream)();
    if (n == "lane") LAUNCH(lane_left, 1, 32, stream)();
    if (n == "warp-block") LAUNCH(warp_against_block, 1, 32, stream)();
    if (n == "short") LAUNCH(short_block, 1, 40, stream)();
    if (n == "part") LAUNCH(part_of_warp, 1, 32, stream)();
    if (n == "operations") LAUNCH(different_operations, 1, 32, stream)();
    if (n == "misaligned") LAUNCH(misaligned, 1, 2, stream)(x);
    if (n == "write") LAUNCH(writes_at, 1, 1, stream)(x, 12);
    if (n == "local") LAUNCH(reads_local, 1, 2, stream)(x, 4);
    if (n == "stream-0") LAUNCH(writes_at, 1, 1, 0)(x, 3);
    if (n == "copy-0") cudaMemsetAsync(x, 0, 4);
    if (n == "no-stream") {
        cudaEvent_t never;
        CUDA_CHECK(cudaEventCreate(&never));
        cudaStreamWaitEvent((cudaStream_t)x, never);
    }
    if (n == "refused") {
        LAUNCH(writes_at, 0, 1, stream)(x, 3);
        _exit(0);
    }
    if (n == "stall") {
        cudaStream_t other;
        CUDA_CHECK(cudaStreamCreate(&other));
        nvtxRangePushA("micro-batch 3");
        cpu_enqueue(stream, "waits for nobody", [] { return false; });
        nvtxRangePop();
        cpu_enqueue(other, "also", [] { return false; });
    }
    if (n == "host-read") {
        volatile float *p = x;
        printf("%f\n", (double)p[3]);
    }
    if (n == "enqueue-inside")
        cpu_enqueue(stream, "outer", [] { return cudaStreamSynchronize(stream) == cudaSuccess; });
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaFree(x));
    return 0;
}

// Runs this program again for one case. Returns true if it ends as expected and its output has
// all the words.
static bool ends(const char *name, const char *order, bool fails, std::vector<const char *> words) {
    int out[2], status = 0;
    if (pipe(out) != 0) return false;
    pid_t child = fork();
    if (child == 0) {
        setenv("CPU_STALL_SECONDS", "1", 0);
        setenv("CPU_THREAD_ORDER", order ? order : "", 1);
        dup2(out[1], 1), dup2(out[1], 2), close(out[0]);
        execl("/proc/self/exe", "test_cuda_runtime", name, (char *)NULL);
        _exit(127);
    }
    close(out[1]);
    std::string text;
    char buffer[4096];
    for (ssize_t n; (n = read(out[0], buffer, sizeof buffer)) > 0;) text.append(buffer, (size_t)n);
    close(out[0]);
    waitpid(child, &status, 0);
    bool good = fails == !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    for (const char *word : words) good &= text.find(word) != std::string::npos;
    if (text.find("is not understood") != std::string::npos)
        good &= WIFEXITED(status) && WEXITSTATUS(status) == 2;
    if (!good) printf("case %s ended with status %d and said: %s\n", name, status, text.c_str());
    return good;
}

struct Report {
    const char *name;  // of a case
    std::vector<const char *> words;
    const char *what;
};

static void check_reports(const char *order, const std::vector<Report> &reports) {
    std::string in = order ? std::string(", order '") + order + "'" : "";
    for (const Report &r : reports)
        check(&c, ends(r.name, order, true, r.words), "%s%s", r.what, in.c_str());
}

static void test_reports() {
    for (const char *order : {"", "random:5"}) {
        check_reports(order, {
            {"divergent", {"kernel divergent, block (", "thread (", "divergent barrier: it is at"},
             "divergent barriers are reported"},
            {"exit", {"kernel leaves_early, block (2,0,0), thread (", "thread (40,0,0) has exited"},
             "a barrier after an exit is reported"},
            {"lane", {"kernel lane_left", "in a warp operation: thread (9,0,0) has exited"},
             "a shuffle of a lane that exited is reported"},
            {"warp-block", {"thread (9,0,0) waits at a block barrier"},
             "a warp that waits for a thread at the block's barrier is reported"},
        });
    }
    check_reports(
        NULL,
        {
            {"short",
             {"thread (32,0,0)", "of its warp's lanes only 8 exist"},
             "a full mask in a short warp"},
            {"part",
             {"thread (0,0,0)", "shuffles with mask 0x0000ffff"},
             "a mask of a part of a warp"},
            {"operations",
             {"kernel different_operations", "are at different warp operations"},
             "lanes at operations that differ"},
            {"misaligned",
             {"kernel misaligned", "not a multiple of 16"},
             "128 bits at an odd address"},
            {"write",
             {CPU_ASAN ? "heap-buffer-overflow" : "behind the 40 bytes of device memory"},
             "a kernel's write past the end is caught"},
            {"stall",
             {"no progress for", "stream 1: waits for nobody in micro-batch 3", "stream 2: also"},
             "streams that wait for ever are reported"},
            {"refused",
             {"launch of writes_at: ", "invalid configuration"},
             "LAUNCH ends the program where the device refuses it"},
            {"enqueue-inside",
             {"may not synchronise"},
             "an operation that synchronises is reported"},
        });
    check(&c,
          ends("stream-0", NULL, true, {"writes_at was given stream 0"}) &&
              ends("copy-0", NULL, true, {"cudaMemsetAsync was given stream 0"}) &&
              ends("no-stream", NULL, true,
                   {"cudaStreamWaitEvent was given a stream that does not exist"}),
          "asynchronous work on stream 0, or on a stream that is none, is reported");
    check(&c,
          ends("none", "backwards", true,
               {"CPU_THREAD_ORDER=backwards is not understood: write random:SEED"}),
          "an unknown order is refused");
    const char *const wrong[][2] = {{"CPU_STREAM_ORDER", "random:"}, {"CPU_DEVICE_MEMORY", "12x"},
                                    {"CPU_STALL_SECONDS", "-1"}};
    for (auto &w : wrong) {
        std::string sentence = std::string(w[0]) + "=" + w[1] + " is not understood: write ";
        setenv(w[0], w[1], 1);
        check(&c, ends("none", NULL, true, {sentence.c_str()}), "%s=%s is refused", w[0], w[1]);
        unsetenv(w[0]);
    }
    check(&c, ends("none", NULL, false, {}), "a case without a fault ends well");
    if (!CPU_ASAN) return;
    check_reports(
        NULL, {
                  {"host-read", {"use-after-poison"}, "the host reading device memory is caught"},
                  {"local",
                   {"stack-buffer-overflow"},
                   "a read past an array of a thread that has waited is caught"},
              });
}

int main(int argc, char **argv) {
    if (argc > 1) return run_case(argv[1]);
    CUDA_CHECK(cudaStreamCreate(&stream));
    test_launches();
    test_shuffles();
    test_reductions();
    test_races();
    test_streams();
    test_memory();
    test_device();
    test_bf16();
    test_refused_launches();
    test_reports();
    return check_summary(&c);
}
