// collectives.cu: collectives made of sends and receives, from naive to better, and the library's
// call, which the trainers use. All are checked against sums in double. Runs with any number of
// ranks:
//
//   mpirun -n 4 build/cpu-fp32/dev/cuda/collectives [--bench]
//
// With --bench, "must MB" are the bytes that a rank must send, for n ranks and S bytes:
//   half of an all-reduce  (n - 1) / n S
//   all-reduce             2 (n - 1) / n S
//   shift                  S
// They are counted here, as no kernel's wrapper states them. "asks MB" are the bytes that this
// version sends. The time is the slowest rank's.
#include "dev/cuda/bench.h"

#include "llmc/trainer/job.cuh"

static Lab lab;
static Job job;

// ---- the kernels -----------------------------------------------------------------------
// n ranks; a buffer that is scattered or gathered has n parts of `count` elements.

typedef struct {
    floatX *send, *recv, *parts;  // [n, count] each
    size_t count;
} Problem;

// Computes out, the sum of n parts, in the order of the ranks, in float, rounded once.
__global__ void sum_parts(floatX *out, const floatX *parts, size_t n, size_t count) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float sum = 0.0f;
    for (size_t r = 0; r < n; r++) sum += to_float(parts[r * count + i]);
    out[i] = from_float<floatX>(sum);
}

static size_t ranks(void) { return (size_t)job.size; }

static void reduce_parts(floatX *out, const floatX *parts, size_t count) {
    LAUNCH(sum_parts, CEIL_DIV(count, (size_t)256), 256, lab.stream)(out, parts, ranks(), count);
}

// Sends part r of `send` to rank r, or all of it if whole. Receives n parts in rank order.
static void all_to_all(floatX *recv, const floatX *send, size_t count, bool whole) {
    NCCL_CHECK(ncclGroupStart());
    for (int r = 0; r < job.size; r++) {
        NCCL_CHECK(ncclSend(send + (whole ? 0 : (size_t)r * count), count, NCCL_FLOATX, r,
                            job.world, lab.stream));
        NCCL_CHECK(
            ncclRecv(recv + (size_t)r * count, count, NCCL_FLOATX, r, job.world, lab.stream));
    }
    NCCL_CHECK(ncclGroupEnd());
}

// Reduce-scatter: computes part `rank` of the sum. 1: every part is sent to its owner, which adds
// it.
static void scatter1(const Problem *p, unsigned) {
    all_to_all(p->parts, p->send, p->count, false);
    reduce_parts(p->recv, p->parts, p->count);
}
static void scatter2(const Problem *p, unsigned) {
    NCCL_CHECK(ncclReduceScatter(p->send, p->recv, p->count, NCCL_FLOATX, ncclSum, job.world,
                                 lab.stream));
}

// All-gather of `count` elements. 1: every rank sends to every rank at once. 2: around a ring, to
// one neighbour at a time.
static void gather1(const Problem *p, unsigned) {
    all_to_all(p->recv, p->send, p->count, true);
}
static void gather2(const Problem *p, unsigned) {
    int next = (job.rank + 1) % job.size, previous = (job.rank + job.size - 1) % job.size;
    CUDA_CHECK(cudaMemcpyAsync(p->recv + (size_t)job.rank * p->count, p->send,
                               p->count * sizeof(floatX), cudaMemcpyDeviceToDevice, lab.stream));
    for (int step = 0; step + 1 < job.size; step++) {
        size_t mine = (size_t)((job.rank - step + job.size) % job.size);
        size_t theirs = (size_t)((job.rank - step - 1 + job.size) % job.size);
        NCCL_CHECK(ncclGroupStart());
        NCCL_CHECK(ncclSend(p->recv + mine * p->count, p->count, NCCL_FLOATX, next, job.world,
                            lab.stream));
        NCCL_CHECK(ncclRecv(p->recv + theirs * p->count, p->count, NCCL_FLOATX, previous,
                            job.world, lab.stream));
        NCCL_CHECK(ncclGroupEnd());
    }
}
static void gather3(const Problem *p, unsigned) {
    NCCL_CHECK(ncclAllGather(p->send, p->recv, p->count, NCCL_FLOATX, job.world, lab.stream));
}

// All-reduce of n * count elements. 1: every rank sends everything to every rank and adds it all.
// 2: a reduce-scatter and an all-gather, which send 2 / n of that.
static void reduce1(const Problem *p, unsigned) {
    for (size_t part = 0; part < ranks();
         part++) {  // part by part, so that one buffer of parts is enough
        all_to_all(p->parts, p->send + part * p->count, p->count, true);
        reduce_parts(p->recv + part * p->count, p->parts, p->count);
    }
}
static void reduce2(const Problem *p, unsigned) {
    floatX *mine = p->recv + (size_t)job.rank * p->count;
    all_to_all(p->parts, p->send, p->count, false);
    reduce_parts(mine, p->parts, p->count);
    CUDA_CHECK(cudaMemcpyAsync(p->parts, mine, p->count * sizeof(floatX),
                               cudaMemcpyDeviceToDevice, lab.stream));
    all_to_all(p->recv, p->parts, p->count, true);
}
static void reduce3(const Problem *p, unsigned) {
    NCCL_CHECK(ncclAllReduce(p->send, p->recv, ranks() * p->count, NCCL_FLOATX, ncclSum,
                             job.world, lab.stream));
}

// Shifts count elements to the next rank, around. 1: even ranks send first, the odd ones receive
// first; then the other way round. (If all sent first, none would receive.) 2: both at once, in a
// group, as pipeline stages do.
static void shift(const Problem *p, bool sends, bool receives) {
    int next = (job.rank + 1) % job.size, previous = (job.rank + job.size - 1) % job.size;
    NCCL_CHECK(ncclGroupStart());
    if (sends) NCCL_CHECK(ncclSend(p->send, p->count, NCCL_FLOATX, next, job.world, lab.stream));
    if (receives)
        NCCL_CHECK(ncclRecv(p->recv, p->count, NCCL_FLOATX, previous, job.world, lab.stream));
    NCCL_CHECK(ncclGroupEnd());
}
static void shift1(const Problem *p, unsigned) {
    bool first = job.rank % 2 == 0;
    if (job.size == 1) return shift(p, true, true);  // to oneself only in a group
    shift(p, first, !first);
    shift(p, !first, first);
}
static void shift2(const Problem *p, unsigned) { shift(p, true, true); }

enum Operation { SCATTER, GATHER, REDUCE, SHIFT };
typedef struct {
    LabKernel kernel;
    Operation operation;
    bool everything;  // sends all n parts to everyone, and not only what it must
} Row;

static const Row ROWS[] = {
    {{"all-reduce", 1, "everything to everyone, everyone adds", reduce1, 1}, REDUCE, true},
    {{"all-reduce", 2, "reduce-scatter, then all-gather, by sends", reduce2, 1}, REDUCE, false},
    {{"all-reduce", 3, "ncclAllReduce (the trainers)", reduce3, 1}, REDUCE, false},
    {{"reduce-scatter", 1, "every part to its rank, which adds", scatter1, 1}, SCATTER, false},
    {{"reduce-scatter", 2, "ncclReduceScatter (the trainers)", scatter2, 1}, SCATTER, false},
    {{"all-gather", 1, "everyone to everyone", gather1, 1}, GATHER, false},
    {{"all-gather", 2, "around a ring", gather2, 1}, GATHER, false},
    {{"all-gather", 3, "ncclAllGather (the trainers)", gather3, 1}, GATHER, false},
    {{"send and receive", 1, "even ranks send first, odd ones receive first", shift1, 1},
     SHIFT,
     false},
    {{"send and receive", 2, "both in one group (the trainers)", shift2, 1}, SHIFT, false},
};

// ---- the checks ------------------------------------------------------------------------

// Returns the values of rank r. Every rank can compute every other rank's.
static float *values_of(int r, size_t n) { return test_values(n, 0.0, 1.0, 100 + (uint64_t)r); }

static Problem make_problem(size_t count) {
    size_t n = ranks() * count;
    return {to_device_floatX(values_of(job.rank, n), n), test_floatX(n), test_floatX(n), count};
}

// Loads the kernel. CUDA does so at its first launch, which must not wait for messages in flight.
static void load_kernel(void) {
    Problem p = make_problem(1);
    reduce_parts(p.recv, p.parts, 1);
    CUDA_CHECK(cudaStreamSynchronize(lab.stream));
}

static double slowest(double x) {
    double largest;
    MPI_Allreduce(&x, &largest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return largest;
}

// This rank's error of one row at one size.
static double row_error(const Row *row, size_t count) {
    size_t mark = test_count, n = ranks(), total = n * count, results = count;
    Problem p = make_problem(count);
    double *want = test_doubles(total);
    for (int r = 0; r < job.size; r++) {
        float *x = values_of(r, total);
        size_t mine = (size_t)job.rank * count;
        for (size_t i = 0; i < total; i++) {
            if (row->operation == REDUCE) want[i] += (double)x[i];
            if (row->operation == SCATTER && i < count) want[i] += (double)x[mine + i];
            if (row->operation == GATHER && i < count) want[(size_t)r * count + i] = (double)x[i];
            if (row->operation == SHIFT && i < count && (r + 1) % job.size == job.rank)
                want[i] = (double)x[i];
        }
    }
    if (row->operation == REDUCE || row->operation == GATHER) results = total;
    row->kernel.run(&p, 1);
    double error = test_error_floatX(p.recv, want, results, lab.stream);
    test_release(mark);
    return error;
}

static void check_kernels(void) {
    static const size_t counts[] = {1, 3, 64, 1001, 40000};
    for (const Row &row : ROWS) {
        double error = 0.0;
        for (size_t count : counts) error = fmax(error, row_error(&row, count));
        bool copies = row.operation == GATHER || row.operation == SHIFT;
        // A library may round to floatX at every one of its additions.
        lab_check(&lab, &row.kernel, slowest(error),
                  copies ? 0.0 : FLOATX_ROUNDING * (double)job.size + 1e-7);
    }
}

static void bench(void) {
    printf("%d rank%s\n", job.size, job.size == 1 ? "" : "s");
    Problem p = make_problem((size_t)(lab.cpu ? 1 << 18 : 1 << 24) / ranks());
    double part = (double)(p.count * sizeof(floatX)), others = (double)(job.size - 1);
    for (const Row &row : ROWS) {
        Operation operation = row.operation;
        KernelWork must = KernelWork();
        must.bytes = part * (operation == SHIFT    ? 1.0
                             : operation == REDUCE ? 2.0 * others
                                                   : others);
        lab_bench(&lab, &row.kernel, &p, must,
                  row.everything ? part * others * (double)job.size : must.bytes);
    }
}

int main(int argc, char **argv) {
    job_start(&job, &argc, &argv);
    Error err;
    struct cudaDeviceProp prop;
    bool ok = job_check_devices(&job, &prop, &err);
    job_agree(&job, ok, &err);
    job_connect(&job);
    static char nowhere[] = "/dev/null";
    for (int i = 1; job.rank != 0 && i + 1 < argc; i++) {  // one rank writes the log
        if (strcmp(argv[i], "--log") == 0) argv[i + 1] = nowhere;
    }
    lab_start(&lab, argc, argv, slowest);
    load_kernel();
    if (lab.bench) bench();
    else check_kernels();
    int code = lab_finish(&lab);
    job_finish(&job);
    return code;
}
