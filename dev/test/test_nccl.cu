// test_nccl.cu: tests NCCL over MPI. mpirun starts it with any number of ranks.
// dev/test/run_nccl.sh runs it at several sizes. It also runs the failing modes: `test_nccl
// deadlock`, `destroy`, `use WHAT`, `mismatch KIND`, `absent`, `loop`, `exit`.
#include <nccl.h>
#include <signal.h>

#include "dev/test/check.h"
#include "llmc/kernels/matmul.cuh"

#include <nvtx3/nvToolsExt.h>

static Check totals;
static int world_rank, world_size;

// Checks a condition on all ranks. Rank 0 prints the check, and each failing rank its line.
#define CHECK_ALL(ok, ...) check_all(ok, __LINE__, __VA_ARGS__)
__attribute__((format(printf, 3, 4))) static void check_all(bool ok, int line, const char *format,
                                                            ...) {
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    int mine = ok, all;
    MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    if (!ok) fprintf(stderr, "rank %d: line %d failed\n", world_rank, line);
    if (world_rank == 0) check(&totals, all != 0, "%d ranks: %s", world_size, text);
}

static void must(ncclResult_t result, int line) {
    if (result == ncclSuccess) return;
    fprintf(stderr, "rank %d, line %d: %s: %s\n", world_rank, line, ncclGetErrorString(result),
            ncclGetLastError(NULL));
    MPI_Abort(MPI_COMM_WORLD, 3);
}
#define NCCL(call) must(call, __LINE__)

static ncclComm_t split(ncclComm_t comm, int color, int key, const char *name) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.commName = name;
    ncclComm_t part = NULL;
    NCCL(ncclCommSplit(comm, color, key, &part, &config));
    return part;
}

static char *device(size_t bytes) {
    void *p;
    if (cudaMalloc(&p, bytes ? bytes : 1) != cudaSuccess) MPI_Abort(MPI_COMM_WORLD, 3);
    return (char *)p;
}

static void to_device(void *to, const void *from, size_t bytes) {
    cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice);
}

static bool holds(const void *on_device, const void *expected, size_t bytes) {
    if (bytes == 0) return true;
    std::vector<char> got(bytes);
    cudaMemcpy(got.data(), on_device, bytes, cudaMemcpyDeviceToHost);
    return memcmp(got.data(), expected, bytes) == 0;
}

// Connects every way of a communicator, with nothing else in flight, so that later calls only
// enqueue.
static ncclComm_t connected(ncclComm_t comm, cudaStream_t stream) {
    int n = 0;
    NCCL(ncclCommCount(comm, &n));
    for (size_t count : {(size_t)1, (size_t)nccl_mpi::LARGE / 8}) {
        char *a = device(count * n * 8), *b = device(count * n * 8);
        NCCL(ncclAllReduce(a, b, count, ncclDouble, ncclSum, comm, stream));
        NCCL(ncclReduceScatter(a, b, count, ncclDouble, ncclSum, comm, stream));
        NCCL(ncclAllGather(a, b, count, ncclDouble, comm, stream));
        NCCL(ncclBroadcast(a, b, count, ncclDouble, 0, comm, stream));
        NCCL(ncclReduce(a, b, count, ncclDouble, ncclSum, 0, comm, stream));
        NCCL(ncclGroupStart());
        for (int r = 0; r < n && count == 1; r++) {
            NCCL(ncclSend(a, 1, ncclDouble, r, comm, stream));
            NCCL(ncclRecv(b + r * 8, 1, ncclDouble, r, comm, stream));
        }
        NCCL(ncclGroupEnd());
        cudaStreamSynchronize(stream);
        cudaFree(a);
        cudaFree(b);
    }
    return comm;
}

static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Returns element i of rank's input. The values span ten binary orders, so that the order of a
// sum shows in its bits.
static double value(int rank, size_t i) {
    uint64_t x = mix((uint64_t)rank * 1000003 + i);
    return ((double)(x >> 11) * 0x1p-53 - 0.5) * (double)(1 << (x % 10));
}

// Rounds to nearest even by comparing the two neighbours, unlike the code under test.
static uint16_t float_to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint16_t down = (uint16_t)(bits >> 16), up = (uint16_t)(down + 1);
    double below = fabs((double)f - bf16_to_float(down)),
           above = fabs((double)bf16_to_float(up) - f);
    if (below != above) return below < above ? down : up;
    return down & 1 ? up : down;
}

static void put(char *p, size_t i, int type, double x) {
    switch (type) {
        case ncclFloat32: ((float *)p)[i] = (float)x; break;
        case ncclFloat64: ((double *)p)[i] = x; break;
        default: ((uint16_t *)p)[i] = float_to_bf16((float)x); break;
    }
}

static double get(const char *p, size_t i, int type) {
    switch (type) {
        case ncclFloat32: return (double)((const float *)p)[i];
        case ncclFloat64: return ((const double *)p)[i];
        default: return (double)bf16_to_float(((const uint16_t *)p)[i]);
    }
}

// Returns the reduction of all ranks' inputs. Sums of floats and of bf16 are rounded to float at
// every addition. A double that is rounded has the same sum. The order is the ranks' or a
// ring's. On a ring an element begins behind its owner and ends there. A rank owns `chunk`
// elements, or the root owns all.
static std::vector<char> reduced(const std::vector<std::vector<char>> &inputs, size_t count,
                                 int type, int redop, const std::vector<int> &ring = {},
                                 size_t chunk = 1, int root = -1) {
    std::vector<char> out(count * NCCL_MPI_TYPES[type].bytes);
    size_t n = inputs.size();
    for (size_t i = 0; i < count; i++) {
        std::vector<int> order;
        for (size_t r = 0; r < n; r++) order.push_back(ring.empty() ? (int)r : ring[r]);
        if (!ring.empty()) {
            auto owner = std::find(order.begin(), order.end(), root < 0 ? (int)(i / chunk) : root);
            std::rotate(order.begin(), owner + 1, order.end());
        }
        double all = get(inputs[order[0]].data(), i, type);
        for (size_t r = 1; r < n; r++) {
            double x = get(inputs[order[r]].data(), i, type);
            if (redop == ncclMax) all = fmax(all, x);
            else all = type == ncclFloat64 ? all + x : (double)(float)(all + x);
        }
        put(out.data(), i, type, all);
    }
    return out;
}

// Compares all collectives for one type and count with plain loops, in place and not.
static bool collectives_agree(ncclComm_t comm, cudaStream_t stream, ncclDataType_t type,
                              size_t count, bool all_ops, const std::vector<int> &ring = {}) {
    int n = 0, rank = 0;
    NCCL(ncclCommCount(comm, &n));
    NCCL(ncclCommUserRank(comm, &rank));
    size_t w = NCCL_MPI_TYPES[type].bytes, bytes = count * w;
    bool ok = true;
    std::vector<std::vector<char>> inputs(n, std::vector<char>(bytes * n));
    for (int r = 0; r < n; r++) {
        for (size_t i = 0; i < count * n; i++) put(inputs[r].data(), i, type, value(r, i));
    }
    char *a = device(bytes * n), *b = device(bytes * n);
    const ncclRedOp_t redops[] = {ncclSum, ncclMax};
    for (int o = 0; o < (all_ops ? 2 : 1); o++) {
        size_t chunk = std::max((count + n - 1) / n, (size_t)1);
        std::vector<char> all = reduced(inputs, count, type, redops[o], ring, chunk);
        std::vector<char> parts = reduced(inputs, count * n, type, redops[o], ring, count);
        for (int in_place = 0; in_place < 2; in_place++) {
            to_device(a, inputs[rank].data(), bytes * n);
            NCCL(ncclAllReduce(a, in_place ? a : b, count, type, redops[o], comm, stream));
            cudaStreamSynchronize(stream);
            ok = ok && holds(in_place ? a : b, all.data(), bytes);
            to_device(a, inputs[rank].data(), bytes * n);
            char *part = in_place ? a + rank * bytes : b;
            NCCL(ncclReduceScatter(a, part, count, type, redops[o], comm, stream));
            cudaStreamSynchronize(stream);
            ok = ok && holds(part, parts.data() + rank * bytes, bytes);

            // A sum ends at its root; the other ranks keep what they have, and need no recvbuff.
            int root = (int)((count + 1) % n);
            std::vector<char> sums =
                reduced(inputs, count, type, redops[o], ring, 1, root);
            to_device(a, inputs[rank].data(), bytes * n);
            to_device(b, inputs[rank].data(), bytes);
            char *to = in_place ? a : rank == root ? b : NULL;
            NCCL(ncclReduce(a, to, count, type, redops[o], root, comm, stream));
            cudaStreamSynchronize(stream);
            const char *kept = inputs[rank].data();
            if (rank == root) ok = ok && holds(to, sums.data(), bytes);
            else ok = ok && holds(a, kept, bytes * n) && holds(b, kept, bytes);
        }
    }
    for (int in_place = 0; in_place < 2; in_place++) {
        std::vector<char> expected;
        for (int r = 0; r < n; r++)
            expected.insert(expected.end(), inputs[r].begin(), inputs[r].begin() + bytes);
        char *part = in_place ? a + rank * bytes : b;
        to_device(part, inputs[rank].data(), bytes);
        NCCL(ncclAllGather(part, a, count, type, comm, stream));
        cudaStreamSynchronize(stream);
        ok = ok && holds(a, expected.data(), bytes * n);
        int root = (int)(count % n);
        to_device(a, inputs[rank].data(), bytes);
        NCCL(ncclBroadcast(a, in_place ? a : b, count, type, root, comm, stream));
        cudaStreamSynchronize(stream);
        ok = ok && holds(in_place ? a : b, inputs[root].data(), bytes);
    }
    cudaFree(a);
    cudaFree(b);
    return ok;
}

static void test_collectives(ncclComm_t comm, cudaStream_t stream, const char *paths) {
    const ncclDataType_t types[] = {ncclFloat32, ncclBfloat16, ncclFloat64};
    const size_t counts[] = {0, 1, 3, 17, 257, 2051};
    for (ncclDataType_t type : types) {
        bool ok = true;
        for (size_t count : counts) ok = collectives_agree(comm, stream, type, count, true) && ok;
        CHECK_ALL(ok, "collectives, %s, %s, counts 0..2051, in place and not",
                  NCCL_MPI_TYPES[type].name, paths);
    }
}

// Tests NCCL_ORDER, which new communicators take. ring:0 is a ring in the order of ranks, and
// ring:SEED is another one for all communicators. any:SEED gives each communicator its own.
static void test_ring_orders(ncclComm_t world, cudaStream_t stream) {
    static const struct {
        const char *name;
        nccl_mpi::RingOrder order;
    } ROWS[] = {
        {"ring:0", {true, false, 0}}, {"ring:7", {true, false, 7}}, {"any:7", {true, true, 7}}};
    for (auto &row : ROWS) {
        nccl_mpi::state().order = row.order;
        ncclComm_t comms[6];
        bool ok = true, alike = true, sorted = true;
        for (int i = 0; i < 6; i++) {
            comms[i] = split(world, 0, world_rank, "ring");
            std::vector<int> ring = comms[i]->ring, first = comms[0]->ring;
            alike = alike && ring == first;
            sorted = sorted && std::is_sorted(ring.begin(), ring.end());
            MPI_Bcast(first.data(), world_size, MPI_INT, 0, MPI_COMM_WORLD);
            // Alike on all ranks.
            ok = ok && (int)ring.size() == world_size && first == comms[0]->ring;
        }
        connected(comms[5], stream);
        for (size_t count : {(size_t)1, (size_t)3, (size_t)2051, (size_t)70001})
            ok = collectives_agree(comms[5], stream, ncclFloat32, count, true, comms[5]->ring) &&
                 ok;
        if (!row.order.own) ok = ok && alike && (row.order.seed != 0 || sorted);
        if (row.order.own && world_size > 3) ok = ok && !alike;
        CHECK_ALL(ok,
                  "NCCL_ORDER=%s: sums begin behind the owner, go round the ring and end there",
                  row.name);
        for (ncclComm_t comm : comms) NCCL(ncclCommDestroy(comm));
    }
    nccl_mpi::state().order = {false, false, 0};
}

// Tests send and receive:
//   a ring in one group.
//   two messages each way with one peer in one group (p = 2 interleaved).
//   a message to oneself.
//   messages outside of groups, which even ranks send first.
static void test_point_to_point(ncclComm_t comm, cudaStream_t stream, const char *paths) {
    int n = world_size, rank = world_rank;
    bool ok = true;
    for (size_t count : {(size_t)0, (size_t)1, (size_t)1000, (size_t)50001}) {
        size_t bytes = count * sizeof(float);
        std::vector<std::vector<float>> inputs(n, std::vector<float>(2 * count));
        for (int r = 0; r < n; r++) {
            for (size_t i = 0; i < 2 * count; i++) inputs[r][i] = (float)value(r, i);
        }
        float *a = (float *)device(2 * bytes), *b = (float *)device(2 * bytes),
              *own = (float *)device(bytes);
        to_device(a, inputs[rank].data(), 2 * bytes);
        int next = (rank + 1) % n, previous = (rank + n - 1) % n;
        NCCL(ncclGroupStart());
        NCCL(ncclSend(a, count, ncclFloat, next, comm, stream));
        NCCL(ncclRecv(b, count, ncclFloat, previous, comm, stream));
        NCCL(ncclSend(a, count, ncclFloat, rank, comm, stream));
        NCCL(ncclRecv(own, count, ncclFloat, rank, comm, stream));
        NCCL(ncclGroupEnd());
        cudaStreamSynchronize(stream);
        ok = ok && holds(b, inputs[previous].data(), bytes) &&
             holds(own, inputs[rank].data(), bytes);

        int peer = rank ^ 1;
        if (peer < n) {
            NCCL(ncclGroupStart());
            NCCL(ncclRecv(b, count, ncclFloat, peer, comm, stream));
            NCCL(ncclSend(a, count, ncclFloat, peer, comm, stream));
            NCCL(ncclSend(a + count, count, ncclFloat, peer, comm, stream));
            NCCL(ncclRecv(b + count, count, ncclFloat, peer, comm, stream));
            NCCL(ncclGroupEnd());
            cudaStreamSynchronize(stream);
            ok = ok && holds(b, inputs[peer].data(), 2 * bytes);
            for (int half = 0; half < 2; half++) {
                if ((rank + half) % 2 == 0)
                    NCCL(ncclSend(a + half * count, count, ncclFloat, peer, comm, stream));
                else NCCL(ncclRecv(b, count, ncclFloat, peer, comm, stream));
            }
            cudaStreamSynchronize(stream);
            ok = ok && holds(b, inputs[peer].data() + (rank % 2 ? 0 : count), bytes);
        }
        cudaFree(a);
        cudaFree(b);
        cudaFree(own);
    }
    CHECK_ALL(ok, "send and receive, %s: ring, p = 2 interleaved, oneself, ungrouped", paths);
}

static void test_communicators(ncclComm_t world, cudaStream_t stream) {
    ncclComm_t backwards = split(world, 0, -world_rank, "backwards");
    int rank = 0, size = 0;
    NCCL(ncclCommUserRank(backwards, &rank));
    CHECK_ALL(rank == world_size - 1 - world_rank, "ncclCommSplit orders by key");
    ncclComm_t parity = split(world, world_rank % 2, world_rank, "parity");
    NCCL(ncclCommCount(parity, &size));
    CHECK_ALL(size == (world_size + 1 - world_rank % 2) / 2 && parity->name == "parity",
              "ncclCommSplit groups by colour");
    bool ok = collectives_agree(parity, stream, ncclFloat32, 100, true);
    CHECK_ALL(ok && collectives_agree(backwards, stream, ncclBfloat16, 100, true),
              "collectives on parts of the world");
    ncclComm_t none = split(world, world_rank == 0 ? 0 : NCCL_SPLIT_NOCOLOR, 0, NULL);
    CHECK_ALL((none != NULL) == (world_rank == 0), "NCCL_SPLIT_NOCOLOR gives no communicator");
    NCCL(ncclCommDestroy(none));
    NCCL(ncclCommDestroy(parity));
    NCCL(ncclCommDestroy(backwards));
}

// Tests a group in a group, and one over two communicators or streams, which is refused.
static void test_groups(ncclComm_t world, cudaStream_t *streams) {
    ncclComm_t second = connected(split(world, 0, world_rank, "second"), streams[0]);
    const size_t count = 3000;
    std::vector<std::vector<char>> inputs(world_size, std::vector<char>(count * sizeof(float)));
    for (int r = 0; r < world_size; r++) {
        for (size_t i = 0; i < count; i++) put(inputs[r].data(), i, ncclFloat32, value(r, i));
    }
    char *buffers[2];
    for (char *&b : buffers) {
        b = device(count * sizeof(float));
        to_device(b, inputs[world_rank].data(), count * sizeof(float));
    }
    NCCL(ncclGroupStart());
    NCCL(ncclAllReduce(buffers[0], buffers[0], count, ncclFloat, ncclSum, world, streams[0]));
    NCCL(ncclGroupStart());
    NCCL(ncclAllReduce(buffers[1], buffers[1], count, ncclFloat, ncclMax, world, streams[0]));
    NCCL(ncclGroupEnd());
    bool idle = cudaStreamQuery(streams[0]) == cudaSuccess;  // the inner end issues nothing
    NCCL(ncclGroupEnd());
    cudaDeviceSynchronize();
    bool ok = idle;
    const ncclRedOp_t redops[] = {ncclSum, ncclMax};
    for (int i = 0; i < 2; i++) {
        std::vector<char> expected = reduced(inputs, count, ncclFloat32, redops[i]);
        ok = ok && holds(buffers[i], expected.data(), expected.size());
    }
    CHECK_ALL(ok, "a group in a group is issued at the end of the outer one");
    for (int other = 0; other < 2; other++) {
        NCCL(ncclGroupStart());
        NCCL(ncclAllReduce(buffers[0], buffers[0], count, ncclFloat, ncclSum, world, streams[0]));
        ok = ok && ncclAllReduce(buffers[1], buffers[1], count, ncclFloat, ncclMax,
                                 other ? second : world, streams[!other]) == ncclInvalidUsage;
        ok = ok && ncclGroupEnd() == ncclInvalidUsage && cudaStreamQuery(streams[0]) == cudaSuccess;
    }
    CHECK_ALL(
        ok, "a group over two communicators or streams is refused, and nothing of it is issued");
    for (char *b : buffers) cudaFree(b);
    NCCL(ncclCommDestroy(second));
}

// Tests more operations in flight than gpu_queue.h's pinned memory may hold.
static void test_many(ncclComm_t comm, cudaStream_t stream) {
    const size_t groups = 256, count = 8192, n = groups * count;
    std::vector<float> mine(n), sum(n);
    for (size_t i = 0; i < n; i++) {
        mine[i] = (float)(i % 8191 + (size_t)world_rank);
        sum[i] = (float)((size_t)world_size * (i % 8191) +
                         (size_t)(world_size * (world_size - 1) / 2));
    }
    float *x = (float *)device(n * sizeof *x);
    to_device(x, mine.data(), n * sizeof *x);
    for (size_t i = 0; i < n; i += count)
        NCCL(ncclAllReduce(x + i, x + i, count, ncclFloat, ncclSum, comm, stream));
    cudaStreamSynchronize(stream);
    CHECK_ALL(holds(x, sum.data(), n * sizeof *x), "256 all-reduces in flight");
    cudaFree(x);
}

static void test_semantics(ncclComm_t comm, cudaStream_t *streams) {
    float *x = (float *)device(4096), *y = (float *)device(4096);
    cudaMemset(x, 0, 4096);
    cudaMemset(y, 0, 4096);
    bool ok = true;
    if (world_rank == 0) {
        NCCL(ncclSend(x, 8, ncclFloat, 1, comm, streams[0]));
        for (int i = 0; i < 20; i++) {
            ok = ok && cudaStreamQuery(streams[0]) == cudaErrorNotReady;
            usleep(1000);
        }
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (world_rank == 1) NCCL(ncclRecv(x, 8, ncclFloat, 0, comm, streams[0]));
    cudaStreamSynchronize(streams[0]);
    CHECK_ALL(ok, "a small send is incomplete until its receive is posted");

    if (world_rank == 1) {
        NCCL(ncclRecv(x, 8, ncclFloat, 0, comm, streams[0]));
        cudaMemsetAsync(y, 1, 4096, streams[1]);
        cudaStreamSynchronize(streams[1]);  // would hang if the receive held up other streams
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (world_rank == 0) NCCL(ncclSend(x, 8, ncclFloat, 1, comm, streams[0]));
    cudaDeviceSynchronize();
    CHECK_ALL(true, "other streams run while a receive waits");

    for (int i = 0; i < 4; i++) {  // host order rules, though each is on another stream and the
                                   // last is waited for first
        float one = (float)(i + 1);
        to_device(x + i, &one, sizeof one);
        NCCL(ncclAllReduce(x + i, x + i, 1, ncclFloat, ncclSum, comm, streams[i % 3]));
    }
    cudaStreamSynchronize(streams[0]);
    float expected[4] = {1.f * world_size, 2.f * world_size, 3.f * world_size, 4.f * world_size};
    CHECK_ALL(holds(x, expected, sizeof expected),
              "operations of a communicator run in the order of issue");

    float nan = NAN;
    to_device(x, world_rank == 1 ? &nan : expected, sizeof nan);
    NCCL(ncclAllReduce(x, y, 1, ncclFloat, ncclMax, comm, streams[0]));
    cudaDeviceSynchronize();
    float got;
    cudaMemcpy(&got, y, sizeof got, cudaMemcpyDeviceToHost);
    CHECK_ALL(got != got, "a NaN on one rank survives a maximum");
    cudaFree(x);
    cudaFree(y);
}

// Destroys a communicator on all ranks, on the last one 0.1 s later. Returns true if rank
// 0 waits for it.
static bool destroy_waits(ncclComm_t comm) {
    int last = world_size - 1, back = 0;
    cudaDeviceSynchronize();
    MPI_Barrier(MPI_COMM_WORLD);
    for (double end = MPI_Wtime() + 0.1; world_rank == last && !back && MPI_Wtime() < end;
         usleep(1000))
        MPI_Iprobe(0, 7, MPI_COMM_WORLD, &back, MPI_STATUS_IGNORE);
    NCCL(ncclCommDestroy(comm));
    if (world_rank == 0) MPI_Send(NULL, 0, MPI_INT, last, 7, MPI_COMM_WORLD);
    if (world_rank == last) MPI_Recv(NULL, 0, MPI_INT, 0, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    MPI_Bcast(&back, 1, MPI_INT, last, MPI_COMM_WORLD);
    cudaDeviceSynchronize();
    return !back;
}

static bool refused(ncclResult_t result, const char *what, const char *beside) {
    const char *why = ncclGetLastError(NULL);
    return result == ncclInvalidUsage && strstr(why, what) && strstr(why, beside);
}

// Tests that the first use of a communicator is refused beside other operations.
static void test_connections(ncclComm_t world, cudaStream_t *streams) {
    float *x = (float *)device(4096);
    ncclComm_t comm = split(world, 0, world_rank, "fresh"),
               other = split(world, 0, world_rank, "other");
    NCCL(ncclAllReduce(x, x, 8, ncclFloat, ncclSum, comm, streams[0]));
    bool ok = refused(ncclAllGather(x, x + 100, 8, ncclFloat, other, streams[0]),
                      "ncclAllGather of 8 float32 (other)",
                      "while ncclAllReduce of 8 float32, sum (fresh) is in flight");
    int peer = world_rank == 0 ? 1 : 0;
    ok = ok && refused(ncclSend(x, 8, ncclFloat, peer, other, streams[1]),
                       "ncclSend of 8 float32 to rank", "(fresh)");
    ok = ok && refused(ncclBroadcast(x, x, 8, ncclFloat, 0, comm, streams[1]), "(fresh)",
                       "(fresh) is in flight");
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t none = NULL;
    ok = ok && ncclCommSplit(comm, 0, 0, &none, &config) == ncclInvalidUsage && !none;
    NCCL(ncclBroadcast(x, x, 8, ncclFloat, 0, comm, streams[0]));  // behind it on its own stream
    cudaDeviceSynchronize();
    CHECK_ALL(ok, "a first use beside another operation is refused, and both are named");

    NCCL(ncclAllGather(x, x + 100, 8, ncclFloat, other, streams[0]));
    cudaDeviceSynchronize();
    NCCL(ncclAllReduce(x, x, 8, ncclFloat, ncclSum, comm, streams[0]));
    NCCL(ncclAllGather(x + 200, x + 300, 8, ncclFloat, other, streams[1]));
    cudaDeviceSynchronize();
    CHECK_ALL(true, "after a first use with nothing in flight, operations overlap");

    NCCL(ncclCommSplit(comm, 0, world_rank, &none, &config));
    NCCL(ncclGroupStart());
    NCCL(ncclCommDestroy(other));
    NCCL(ncclCommDestroy(none));
    NCCL(ncclGroupEnd());
    CHECK_ALL(destroy_waits(comm), "ncclCommDestroy waits for all ranks, and may stand in a group");
    cudaFree(x);
}

__global__ void add_one(float *x) { *x += 1; }

// Tests that a kernel and a product that have run before may run beside a receive.
static void test_uses(ncclComm_t comm, cudaStream_t *streams) {
    float *x = (float *)device(4096);
    floatX *m = (floatX *)device(4096);
    Matmul matmul;
    matmul_create(&matmul, streams[0]);
    cudaMemset(m, 0, 4096);
    cudaMemset(x, 0, 4096);
    for (int pending = 0; pending < 2; pending++) {
        if (pending && world_rank == 1) NCCL(ncclRecv(x, 8, ncclFloat, 0, comm, streams[1]));
        LAUNCH(add_one, 1, 1, streams[0])(x + 100);
        matmul_forward(&matmul, m, m + 256, m + 512, NULL, 8, 8, 8);
        cudaStreamSynchronize(streams[0]);
    }
    if (world_rank == 0) NCCL(ncclSend(x, 8, ncclFloat, 1, comm, streams[1]));
    cudaDeviceSynchronize();
    float got;
    cudaMemcpy(&got, x + 100, sizeof got, cudaMemcpyDeviceToHost);
    CHECK_ALL(got == 2, "kernels that have been used before run beside a receive");
    cudaFree(x);
    cudaFree(m);
}

[[maybe_unused]] static void test_misuse(ncclComm_t comm, cudaStream_t stream) {
    float *x = (float *)device(1024);
    static float host[16];
    bool ok = true;
    ok = ok && ncclAllReduce(x, x, 4, ncclFloat, ncclSum, NULL, stream) == ncclInvalidArgument;
    ok = ok && ncclAllReduce(x, x, 257, ncclFloat, ncclSum, comm, stream) == ncclInvalidArgument;
    ok = ok && ncclAllReduce(x, x + 1, 4, ncclFloat, ncclSum, comm, stream) == ncclInvalidArgument;
    ok = ok && ncclAllReduce(host, x, 4, ncclFloat, ncclSum, comm, stream) == ncclInvalidArgument;
    ok = ok && ncclAllReduce(x, x, SIZE_MAX / 2, ncclFloat, ncclSum, comm, stream) ==
                   ncclInvalidArgument;
    ok = ok && ncclReduceScatter(x, x + 128, 256 / world_size + 1, ncclFloat, ncclSum, comm,
                                 stream) == ncclInvalidArgument;
    ok = ok && ncclAllGather(x, x, 256, ncclFloat, comm, stream) == ncclInvalidArgument;
    ok = ok && ncclBroadcast(x, x, 4, ncclFloat, world_size, comm, stream) == ncclInvalidArgument;
    ok = ok &&
         ncclReduce(x, x, 4, ncclFloat, ncclSum, -1, comm, stream) == ncclInvalidArgument &&
         ncclReduce(x, host, 4, ncclFloat, ncclSum, world_rank, comm, stream) ==
             ncclInvalidArgument &&
         ncclReduce(x, x + 1, 4, ncclFloat, ncclSum, world_rank, comm, stream) ==
             ncclInvalidArgument;
    ok = ok && ncclSend(x, 4, ncclFloat, -1, comm, stream) == ncclInvalidArgument;
    ok = ok && ncclRecv(x, 4, ncclFloat, world_size, comm, stream) == ncclInvalidArgument;
    ok = ok && ncclGroupEnd() == ncclInvalidUsage;
    ok = ok && strstr(ncclGetLastError(comm), "ncclGroupEnd") != NULL;
    NCCL(ncclGroupStart());
    ok = ok && ncclSend(x, 4, ncclFloat, 0, comm, stream) == ncclSuccess;
    ok = ok && ncclSend(x, 4, ncclFloat, -7, comm, stream) == ncclInvalidArgument;
    ok = ok && ncclGroupEnd() == ncclInvalidArgument;  // and the good send was not issued
    cudaDeviceSynchronize();
    CHECK_ALL(ok, "misuse returns an error and a sentence");
    cudaFree(x);
}

// Checks bytes by the formulas: summed over the ranks, an all-reduce moves 2 (n-1) buffers, its
// halves (n-1).
static void test_counters(ncclComm_t comm, cudaStream_t stream) {
    const size_t count = 12345, bytes = count * sizeof(float);
    size_t n = (size_t)world_size;
    float *x = (float *)device(bytes * n), *y = (float *)device(bytes * n);
    cudaMemset(x, 0, bytes * n);
    ncclMpiResetCounters(comm);
    for (int i = 0; i < 3; i++) NCCL(ncclAllReduce(x, x, count, ncclFloat, ncclSum, comm, stream));
    NCCL(ncclReduceScatter(x, y, count, ncclFloat, ncclSum, comm, stream));
    NCCL(ncclAllGather(x, y, count, ncclFloat, comm, stream));
    NCCL(ncclBroadcast(x, x, count, ncclFloat, 0, comm, stream));
    NCCL(ncclReduce(x, x, count, ncclFloat, ncclSum, 1, comm, stream));
    cudaStreamSynchronize(stream);
    size_t mine[NCCL_MPI_OPS], sum[NCCL_MPI_OPS], calls = comm->counters[NCCL_MPI_ALL_REDUCE].calls;
    for (int op = 0; op < NCCL_MPI_OPS; op++) mine[op] = comm->counters[op].bytes_sent;
    MPI_Allreduce(mine, sum, NCCL_MPI_OPS, MPI_UNSIGNED_LONG, MPI_SUM, MPI_COMM_WORLD);
    bool ok = calls == 3 && sum[NCCL_MPI_ALL_REDUCE] == 3 * 2 * (n - 1) * bytes;
    ok = ok && sum[NCCL_MPI_REDUCE_SCATTER] == n * (n - 1) * bytes &&
         mine[NCCL_MPI_ALL_GATHER] == (n - 1) * bytes;
    ok = ok && sum[NCCL_MPI_BROADCAST] == (n - 1) * bytes;
    ok = ok && sum[NCCL_MPI_REDUCE] == (n - 1) * bytes &&
         mine[NCCL_MPI_REDUCE] == (world_rank == 1 ? 0 : bytes);
    CHECK_ALL(ok, "bytes sent equal the formulas");
    cudaFree(x);
    cudaFree(y);
}

// Runs random operations on three communicators and four streams, the same on all ranks. Events
// order operations on one buffer. Returns a hash of all buffers.
static uint64_t random_program(ncclComm_t *comms, cudaStream_t *streams, uint64_t seed) {
    enum { BUFFERS = 5, COUNT = 9000 };
    float *buffers[BUFFERS];
    cudaEvent_t last[BUFFERS];
    std::vector<float> values(COUNT);
    for (int b = 0; b < BUFFERS; b++) {
        buffers[b] = (float *)device(COUNT * sizeof(float));
        for (size_t i = 0; i < COUNT; i++) values[i] = (float)value(world_rank + 100 * b, i);
        to_device(buffers[b], values.data(), COUNT * sizeof(float));
        cudaEventCreateWithFlags(&last[b], cudaEventDisableTiming);
    }
    for (int step = 0; step < 40; step++) {
        uint64_t x = mix(seed * 7919 + (uint64_t)step);
        ncclComm_t comm = comms[x % 3];
        cudaStream_t stream = streams[x / 3 % 4];
        int n = 0, rank = 0, kind = (int)(x / 12 % 6);
        NCCL(ncclCommCount(comm, &n));
        NCCL(ncclCommUserRank(comm, &rank));
        size_t to = x / 60 % BUFFERS, from = (to + 1 + x / 300 % (BUFFERS - 1)) % BUFFERS;
        size_t count = step % 7 == 0 ? (size_t)COUNT : 1 + x / 1500 % COUNT;
        cudaStreamWaitEvent(stream, last[to], 0);
        cudaStreamWaitEvent(stream, last[from], 0);
        float *a = buffers[from], *b = buffers[to];
        if (kind == 0) NCCL(ncclAllReduce(a, b, count, ncclFloat, ncclSum, comm, stream));
        if (kind == 1) NCCL(ncclReduceScatter(a, b, count / n, ncclFloat, ncclSum, comm, stream));
        if (kind == 2) NCCL(ncclAllGather(a, b, count / n, ncclFloat, comm, stream));
        if (kind == 3) NCCL(ncclBroadcast(a, b, count, ncclFloat, (int)(count % n), comm, stream));
        if (kind == 5) {  // to every rank a part, in one group
            NCCL(ncclGroupStart());
            for (size_t r = 0, part = count / n; r < (size_t)n; r++)
                NCCL(ncclReduce(a + r * part, b + r * part, part, ncclFloat, ncclSum, (int)r, comm,
                                stream));
            NCCL(ncclGroupEnd());
        }
        if (kind == 4) {
            NCCL(ncclGroupStart());
            NCCL(ncclSend(a, count, ncclFloat, (rank + 1) % n, comm, stream));
            NCCL(ncclRecv(b, count, ncclFloat, (rank + n - 1) % n, comm, stream));
            NCCL(ncclGroupEnd());
        }
        cudaEventRecord(last[to], stream);
        cudaEventRecord(last[from], stream);
    }
    cudaDeviceSynchronize();
    uint64_t hash = 0;
    for (int b = 0; b < BUFFERS; b++) {
        cudaMemcpy(values.data(), buffers[b], COUNT * sizeof(float), cudaMemcpyDeviceToHost);
        for (float v : values) {
            uint32_t bits;
            memcpy(&bits, &v, 4);
            hash = mix(hash ^ bits);
        }
        cudaFree(buffers[b]);
        cudaEventDestroy(last[b]);
    }
    return hash;
}

static void test_random_orders(ncclComm_t world, cudaStream_t *streams) {
    ncclComm_t comms[3] = {
        world, connected(split(world, 0, -world_rank, "backwards"), streams[0]),
        connected(split(world, world_rank % 2, world_rank, "parity"), streams[0])};
    nccl_mpi::State &s = nccl_mpi::state();
    bool ok = true;
    for (uint64_t seed = 1; seed <= 10; seed++) {
        uint64_t plain = random_program(comms, streams, seed);
#ifndef __CUDACC__
        cpu_runtime().stream_order = {true, seed, 0};
#endif
        s.delay = {true, seed * 1000 + (uint64_t)world_rank, 100};
        ok = random_program(comms, streams, seed) == plain && ok;
        s.delay.on = false;
#ifndef __CUDACC__
        cpu_runtime().stream_order = {false, 0, 0};
#endif
    }
    CHECK_ALL(ok, "random stream orders and delays: the same bits, no hang (10 seeds)");
    NCCL(ncclCommDestroy(comms[2]));
    NCCL(ncclCommDestroy(comms[1]));
}

static int run_all(ncclComm_t comm, cudaStream_t *streams) {
    test_communicators(comm, streams[0]);
    size_t usual = nccl_mpi::state().small;
    for (int tiny = 0; tiny < 2; tiny++) {
        if (tiny) nccl_mpi::state().small = 0;
        test_collectives(comm, streams[0], tiny ? "as if large" : "small");
        test_point_to_point(comm, streams[0], tiny ? "as if large" : "small");
    }
    nccl_mpi::state().small = usual;
    bool ok = collectives_agree(comm, streams[0], ncclFloat32, 70001, false);
    CHECK_ALL(ok && collectives_agree(comm, streams[0], ncclBfloat16, 70001, false),
              "collectives of 70001 elements");
    test_ring_orders(comm, streams[0]);
    connected(comm, streams[0]);
    test_groups(comm, streams);
    test_many(comm, streams[0]);
    test_connections(comm, streams);
    test_uses(comm, streams);
    test_semantics(comm, streams);
#ifndef NCCL_MPI_HELPER  // a GPU does not know the bounds of allocations
    test_misuse(comm, streams[0]);
#endif
    test_counters(comm, streams[0]);
    test_random_orders(comm, streams);
    return world_rank == 0 ? check_summary(&totals) : 0;
}

// Sends before receiving on both ranks, outside of a group: NCCL hangs, so must we, with a
// report.
static void deadlock(ncclComm_t comm, cudaStream_t stream) {
    float *x = (float *)device(4096);
    int peer = world_rank ^ 1;
    if (peer < world_size) {
        NCCL(ncclSend(x, 16, ncclFloat, peer, comm, stream));
        NCCL(ncclRecv(x + 16, 16, ncclFloat, peer, comm, stream));
    }
    cudaStreamSynchronize(stream);
}

// Destroys two communicators in another order on odd ranks.
static void destroy(ncclComm_t comm) {
    ncclComm_t parts[2] = {split(comm, 0, world_rank, "even"), split(comm, 0, world_rank, "odd")};
    for (int i = 0; i < 2; i++) NCCL(ncclCommDestroy(parts[i ^ (world_rank % 2)]));
}

// Uses a kernel or a product for the first time beside a receive.
static void use(ncclComm_t comm, cudaStream_t *streams, const char *what) {
    float *x = (float *)device(4096);
    floatX *m = (floatX *)device(4096);
    Matmul matmul;
    matmul_create(&matmul, streams[0]);
    connected(comm, streams[0]);
    nvtxRangePushA("forward micro-batch 3");
    if (world_rank == 1) NCCL(ncclRecv(x, 8, ncclFloat, 0, comm, streams[1]));
    nvtxRangePop();
    if (!strcmp(what, "kernel")) LAUNCH(add_one, 1, 1, streams[0])(x + 100);
    else matmul_forward(&matmul, m, m + 256, m + 512, NULL, 8, 8, 8);
    cudaStreamSynchronize(streams[0]);
    if (world_rank == 0) NCCL(ncclSend(x, 8, ncclFloat, 1, comm, streams[1]));
    cudaDeviceSynchronize();
}

// Makes a slightly different call on rank 1.
static void mismatch(ncclComm_t comm, cudaStream_t stream, const char *kind) {
    float *x = (float *)device(1 << 16), *y = (float *)device(1 << 16);
    bool odd = world_rank == 1;
    if (!strcmp(kind, "count"))
        NCCL(ncclAllReduce(x, x, odd ? 101 : 100, ncclFloat, ncclSum, comm, stream));
    if (!strcmp(kind, "type"))
        NCCL(ncclAllReduce(x, x, 100, odd ? ncclDouble : ncclFloat, ncclSum, comm, stream));
    if (!strcmp(kind, "reduction"))
        NCCL(ncclAllReduce(x, x, 100, ncclFloat, odd ? ncclMax : ncclSum, comm, stream));
    if (!strcmp(kind, "root")) NCCL(ncclBroadcast(x, x, 100, ncclFloat, odd ? 1 : 0, comm, stream));
    if (!strcmp(kind, "owner"))
        NCCL(ncclReduce(x, x, 100, ncclFloat, ncclSum, odd ? 1 : 0, comm, stream));
    if (!strcmp(kind, "operation")) {
        if (odd) NCCL(ncclAllGather(x, y, 100, ncclFloat, comm, stream));
        else NCCL(ncclAllReduce(x, x, 100, ncclFloat, ncclSum, comm, stream));
    }
    if (!strcmp(kind, "message")) {
        if (odd) NCCL(ncclRecv(x, 101, ncclFloat, 0, comm, stream));
        else if (world_rank == 0) NCCL(ncclSend(x, 100, ncclFloat, 1, comm, stream));
    }
    cudaStreamSynchronize(stream);
}

static void hang(int) {
    for (;;) pause();
}

// All-reduces without end, for a rank to be killed, or to hang at SIGUSR2; every rank first
// prints its process id.
static void loop(ncclComm_t comm, cudaStream_t stream, bool one_exits) {
    float *x = (float *)device(1 << 16);
    cudaMemset(x, 0, 1 << 16);
    signal(SIGUSR2, hang);
    printf("pid %d\n", (int)getpid());
    fflush(stdout);
    for (int i = 0;; i++) {
        NCCL(ncclAllReduce(x, x, 1 << 14, ncclFloat, ncclSum, comm, stream));
        cudaStreamSynchronize(stream);
        if (one_exits && i == 100 && world_rank == world_size - 1) exit(1);
    }
}

int main(int argc, char **argv) {
    int provided;
#ifdef NCCL_MPI_HELPER
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
#else
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
#endif
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    if (world_size < 2) {
        fprintf(stderr, "test_nccl needs at least 2 ranks: mpirun -n 2 %s\n", argv[0]);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    const char *mode = argc > 1 ? argv[1] : "all";
    ncclUniqueId id;
    ncclComm_t comm = NULL;
    if (world_rank == 0) NCCL(ncclGetUniqueId(&id));
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
    NCCL(ncclCommInitRank(&comm, world_size, id, world_rank));
    cudaStream_t streams[4];
    for (cudaStream_t &s : streams) cudaStreamCreate(&s);
    int code = 0;
    if (!strcmp(mode, "all")) code = run_all(comm, streams);
    else if (!strcmp(mode, "deadlock")) deadlock(connected(comm, streams[0]), streams[0]);
    else if (!strcmp(mode, "destroy")) destroy(comm);
    else if (!strcmp(mode, "use") && argc > 2) use(comm, streams, argv[2]);
    else if (!strcmp(mode, "mismatch") && argc > 2)
        mismatch(connected(comm, streams[0]), streams[0], argv[2]);
    else if (!strcmp(mode, "absent") && world_rank != 1) split(comm, 0, 0, "all but one");
    else if (!strcmp(mode, "loop") || !strcmp(mode, "exit"))
        loop(comm, streams[0], !strcmp(mode, "exit"));
    NCCL(ncclCommDestroy(comm));
    MPI_Finalize();
    return code;
}
