// global_norm.cu: the squared norm of every gradient tensor: kernels from naive to
// llmc/kernels/global_norm.cuh's, checked against plain loops in double.
#include "dev/cuda/bench.h"

#include "llmc/kernels/global_norm.cuh"

static Lab lab;

// ---- the kernels -----------------------------------------------------------------------

typedef struct {
    double *out, *scratch;    // [count], global_norm_scratch
    const float *grads;
    const Piece *ranges;      // [count]
    size_t count, max_size, total;  // sizes: the largest, and the sum of all
} Problem;

// 1: a block for each tensor: the largest one is left to a single multiprocessor.
__global__ void norm_block_a_tensor(double *out, const float *grads, const Piece *ranges) {
    const float *g = grads + ranges[blockIdx.x].lo;
    size_t size = ranges[blockIdx.x].hi - ranges[blockIdx.x].lo;
    double sum = 0.0;
    for (size_t i = threadIdx.x; i < size; i += blockDim.x) sum += (double)g[i] * (double)g[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

static void norm1(const Problem *p, unsigned block) {
    LAUNCH(norm_block_a_tensor, p->count, block, lab.stream)(p->out, p->grads, p->ranges);
}
static void norm2(const Problem *p, unsigned) {
    global_norm_squared(p->out, p->scratch, p->grads, p->ranges, p->count, p->max_size, p->total,
                        lab.stream);
}

static const LabKernel NORM[] = {
    {"global norm", 1, "a block a tensor", norm1, 0},
    {"global norm", 2, "a warp a chunk of a tensor, then their sum (llmc)", norm2, ROW_THREADS},
};

// ---- the checks ------------------------------------------------------------------------

enum { RANGES = 12, EXTRA = 17 };

static Piece piece(size_t lo, size_t size) { return {lo, lo + size, 0, 0, 0, false, 0}; }
static size_t size_of(const Piece *p) { return p->hi - p->lo; }

static Problem make_problem(const float *grads, const Piece *ranges, size_t count) {
    Problem p = {test_array<double>(count), NULL, grads, to_device(ranges, count), count, 0, 0};
    for (size_t i = 0; i < count; i++)
        p.max_size = size_of(&ranges[i]) > p.max_size ? size_of(&ranges[i]) : p.max_size;
    for (size_t i = 0; i < count; i++) p.total += size_of(&ranges[i]);
    p.scratch = test_array<double>(global_norm_scratch(count, p.max_size));
    return p;
}

// Returns llmc's norms.
static double *norms(const float *grads, const Piece *ranges, size_t count) {
    Problem p = make_problem(grads, ranges, count);
    norm2(&p, 0);
    return to_host(p.out, count, lab.stream);
}

static double norm_error(const double *got, const double *want, size_t count) {
    double worst = 0.0;
    for (size_t i = 0; i < count; i++) {
        double error = fabs(got[i] - want[i]) / (want[i] + 1e-300);
        if (!(error <= worst)) worst = isnan(error) ? (double)INFINITY : error;
    }
    return worst;
}

static void check_norms(const float *g, size_t total, const Piece *ranges, const double *want) {
    float *d_g = to_device(g, total);
    double *got = norms(d_g, ranges, RANGES), error = norm_error(got, want, RANGES);
    check(&lab.checks, error < 1e-12 && got[0] == 0.0, "%d threads a chunk: error %.2e",
          ROW_LANES, error);
    bool ok = true;  // at another place, aligned or not, and alone: the same bits
    for (size_t shift = 1; shift < EXTRA; shift += 3) {
        size_t size = size_of(&ranges[9]);
        Piece one = piece(shift, size);
        float *d_one = test_floats(size + shift);
        CUDA_CHECK(cudaMemcpy(d_one + shift, g + ranges[9].lo, size * sizeof(float),
                              cudaMemcpyHostToDevice));
        ok = ok && *norms(d_one, &one, 1) == got[9];
    }
    check(&lab.checks, ok, "the order depends on the size alone");
    const float broken[] = {NAN, INFINITY};
    CUDA_CHECK(cudaMemcpy(d_g + ranges[7].lo + 39999, &broken[0], sizeof(float),
                          cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(d_g + ranges[3].lo, &broken[1], sizeof(float), cudaMemcpyHostToDevice));
    double *bad = norms(d_g, ranges, RANGES);
    for (int i = 0; i < RANGES; i++)
        ok = ok && (i == 7 ? isnan(bad[i]) : i == 3 ? isinf(bad[i]) : bad[i] == got[i]);
    check(&lab.checks, ok, "a NaN stays in its tensor");
}

static void checks(void) {
    const size_t sizes[RANGES] = {0, 1, 7, 64, 768, 16384, 16385, 40000, 131072, 200003, 589824, 9};
    Piece ranges[RANGES];
    size_t total = 0;
    for (int i = 0; i < RANGES; i++) {
        ranges[i] = piece(total, sizes[i]);
        total += CEIL_DIV(sizes[i], (size_t)64) * 64;
    }
    float *g = (float *)test_memory(total * sizeof(float));
    uint64_t seed = 3;
    for (size_t i = 0; i < total; i++)
        g[i] = (float)(test_random(&seed) * pow(10.0, 20.0 * test_random(&seed)));
    double want[RANGES] = {0.0};
    for (int i = 0; i < RANGES; i++) {
        for (size_t j = 0; j < sizes[i]; j++) {
            want[i] += (double)g[ranges[i].lo + j] * (double)g[ranges[i].lo + j];
        }
    }
    Problem p = make_problem(to_device(g, total), ranges, RANGES);
    for (const LabKernel &k : NORM) {
        k.run(&p, lab_block(&k));
        lab_check(&lab, &k, norm_error(to_host(p.out, RANGES, lab.stream), want, RANGES), 1e-12);
    }
    check_norms(g, total, ranges, want);
    // more pieces than a grid has blocks along y
    size_t many = 65536 + 9;
    Piece *single = (Piece *)test_memory(many * sizeof(Piece));
    for (size_t i = 0; i < many; i++) single[i] = piece(i % total, 1);
    double *squares = norms(to_device(g, total), single, many);
    bool each = true;
    for (size_t i = 0; i < many; i++)
        each = each && squares[i] == (double)g[i % total] * (double)g[i % total];
    check(&lab.checks, each, "65545 pieces");
    // chunk counts never exceed those of a larger range: scratch is sized by the largest
    bool ok = true;
    for (size_t s = 1, last = 0; s < ((size_t)1 << 40); s = s + s / 7 + 1) {
        ok = ok && norm_chunk_count(s) >= last && norm_chunk_count(s) <= NORM_CHUNKS;
        last = norm_chunk_count(s);
    }
    check(&lab.checks, ok, "int overflow: chunks of ranges up to 2^40");
}

// Times the tensors of layers with C = 768, and an embedding.
static void bench(void) {
    static const size_t sizes[] = {768, 768, 2304 * 768, 2304, 768 * 768,  768,
                                   768, 768, 3072 * 768, 3072, 3072 * 768, 768};
    Piece ranges[12 * 12 + 1];
    size_t count = 0, total = 0;
    for (int layer = 0; layer < (lab.cpu ? 1 : 12); layer++) {
        for (int i = 0; i < 12; i++) {
            ranges[count++] = piece(total, sizes[i]);
            total += sizes[i];
        }
    }
    if (!lab.cpu) {
        ranges[count++] = piece(total, (size_t)50304 * 768);
        total += (size_t)50304 * 768;
    }
    float *grads = test_floats(total);
    CUDA_CHECK(cudaMemset(grads, 0, total * sizeof(float)));
    Problem p = make_problem(grads, ranges, count);
    KernelWork must = lab_stated(&lab, LAB_LAST(NORM), &p);
    for (const LabKernel &k : NORM) lab_bench(&lab, &k, &p, must, 4.0 * (double)total);
}

int main(int argc, char **argv) { return lab_main(&lab, argc, argv, checks, bench); }
