// encoder.cu: the embedding, forward and backward: kernels from naive to
// llmc/kernels/encoder.cuh's, checked against llmc/reference_layers.h.
#include "dev/cuda/bench.h"

#include "llmc/kernels/encoder.cuh"
#include "llmc/reference_layers.h"

static Lab lab;

// ---- the kernels -----------------------------------------------------------------------

typedef struct {
    floatX *out;              // [B, T, C]
    const int *tokens;        // [B, T]
    const floatX *wte, *wpe;  // [V, C], [T, C]
    float *dwte, *dwpe;       // [V, C], [T, C]
    const floatX *dout;       // [B, T, C]
    size_t B, T, C, V;
} Problem;

// 1: a thread an element, which looks up its token.
__global__ void embed_element(floatX *out, const int *tokens, const floatX *wte,
                              const floatX *wpe, size_t N, size_t T, size_t C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, n = i / C;
    if (n >= N) return;
    out[i] = from_float<floatX>(to_float(wte[(size_t)tokens[n] * C + i % C]) +
                                to_float(wpe[n % T * C + i % C]));
}

// 1: a thread a channel walks over all positions: always the same order, and hardly any threads.
__global__ void dwte_thread_a_channel(float *dwte, const floatX *dout, const int *tokens,
                                      size_t N, size_t C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= C) return;
    for (size_t n = 0; n < N; n++) dwte[(size_t)tokens[n] * C + i] += to_float(dout[n * C + i]);
}

// 2: a block a position. The first position with a token adds all positions that have it. Each
// block compares N tokens.
__global__ void dwte_first_of_token(float *dwte, const floatX *dout, const int *tokens, size_t N,
                                    size_t C) {
    size_t first = blockIdx.x;
    int token = tokens[first];
    for (size_t n = 0; n < first; n++) {
        if (tokens[n] == token) return;
    }
    for (size_t n = first; n < N; n++) {
        if (tokens[n] != token) continue;
        for (size_t i = threadIdx.x; i < C; i += blockDim.x)
            dwte[(size_t)token * C + i] += to_float(dout[n * C + i]);
    }
}

// 1: a thread an element sums over the batch.
__global__ void dwpe_element(float *dwpe, const floatX *dout, size_t B, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = 0.0f;
    for (size_t b = 0; b < B; b++) sum += to_float(dout[b * n + i]);
    dwpe[i] += sum;
}

static void forward1(const Problem *p, unsigned block) {
    size_t n = p->B * p->T * p->C;
    LAUNCH(embed_element, CEIL_DIV(n, (size_t)block), block, lab.stream)
    (p->out, p->tokens, p->wte, p->wpe, p->B * p->T, p->T, p->C);
}
static void forward2(const Problem *p, unsigned) {
    encoder_forward(p->out, p->tokens, p->wte, p->wpe, p->B, p->T, p->C, 0, p->V, lab.stream);
}
static void tokens1(const Problem *p, unsigned block) {
    LAUNCH(dwte_thread_a_channel, CEIL_DIV(p->C, (size_t)block), block, lab.stream)
    (p->dwte, p->dout, p->tokens, p->B * p->T, p->C);
}
static void tokens2(const Problem *p, unsigned block) {
    LAUNCH(dwte_first_of_token, p->B * p->T, block, lab.stream)
    (p->dwte, p->dout, p->tokens, p->B * p->T, p->C);
}
static void tokens3(const Problem *p, unsigned) {
    encoder_backward(p->dwte, NULL, p->dout, p->tokens, p->B, p->T, p->C, p->T, 0, p->V, true,
                     lab.stream);
}
static void positions1(const Problem *p, unsigned block) {
    size_t n = p->T * p->C;
    LAUNCH(dwpe_element, CEIL_DIV(n, (size_t)block), block, lab.stream)(p->dwpe, p->dout, p->B, n);
}
static void positions2(const Problem *p, unsigned) {
    encoder_backward(NULL, p->dwpe, p->dout, p->tokens, p->B, p->T, p->C, p->T, 0, p->V, true,
                     lab.stream);
}

enum Result { OUT, DWTE, DWPE };
typedef struct {
    LabKernel kernel;
    Result result;  // what it computes
} Row;

static const Row ROWS[] = {
    {{"encoder forward", 1, "an element a thread", forward1, 0}, OUT},
    {{"encoder forward", 2, "a warp a position: one token to look up (llmc)", forward2,
      ROW_THREADS},
     OUT},
    {{"encoder backward, tokens", 1, "a thread a channel, all positions in order", tokens1, 0},
     DWTE},
    {{"encoder backward, tokens", 2, "a block a position, the first of a token adds", tokens2, 0},
     DWTE},
    {{"encoder backward, tokens", 3, "a block lists places, then adds (llmc)", tokens3,
      ENCODER_THREADS},
     DWTE},
    {{"encoder backward, places", 1, "an element a thread", positions1, 0}, DWPE},
    {{"encoder backward, places", 2, "a warp a position, 128-bit loads (llmc)", positions2,
      ROW_THREADS},
     DWPE},
};

// ---- the checks ------------------------------------------------------------------------

typedef struct {
    size_t B, T, maxT, C, V, ranks;
} Case;  // ranks: into how many parts the vocabulary is cut

// Adds dout[N, C] to dwte as the kernel does if each block has one row of the vocabulary, so that
// no other row comes between. Adds in the order of the positions, compensated until the block's
// list is full.
static void add_in_order(float *dwte, const float *dout, const int *tokens, size_t N, size_t C,
                         size_t V) {
    size_t mark = test_count, *listed = (size_t *)test_memory(V * sizeof(size_t));
    float *lost = (float *)test_memory(V * C * sizeof(float));
    memset(listed, 0, V * sizeof *listed);
    memset(lost, 0, V * C * sizeof *lost);
    for (size_t n = 0; n < N; n++) {
        size_t row = (size_t)tokens[n];
        listed[row]++;
        for (size_t c = 0; c < C; c++)
            add_compensated(&dwte[row * C + c], &lost[row * C + c], dout[n * C + c]);
        if ((n + 1) % ENCODER_CHUNK) continue;
        for (size_t v = 0; v < V; v++) {
            if (listed[v] <= ENCODER_LIST - ENCODER_CHUNK) continue;
            listed[v] = 0;
            memset(lost + v * C, 0, C * sizeof *lost);
        }
    }
    test_release(mark);
}

static void check_case(Case k) {
    size_t mark = test_count, N = k.B * k.T, C = k.C, Vl = CEIL_DIV(k.V, k.ranks),
           Vp = Vl * k.ranks;
    cudaStream_t stream = lab.stream;
    float *wte = test_values(Vp * C, 0.0, 1.0, 1), *wpe = test_values(k.maxT * C, 0.0, 1.0, 2);
    float *dout = test_values(N * C, 0.0, 1.0, 3),
          *start = test_values((Vp + k.maxT) * C, 0.0, 1.0, 4);
    int *tokens = (int *)test_memory(N * sizeof(int));
    uint64_t seed = 5;
    for (size_t n = 0; n < N; n++) {  // a third of them are the same token
        double r = 0.5 + 0.5 * test_random(&seed);
        tokens[n] = n % 3 == 1 ? (int)(k.V / 2) : (int)(r * (double)(k.V - 1));
    }
    double *out = test_doubles(N * C), *dwte = widened(start, Vp * C),
           *dwpe = test_doubles(k.maxT * C);
    reference_encoder_forward(out, tokens, widened(wte, Vp * C), widened(wpe, k.maxT * C), k.B,
                              k.T, C, NULL);
    reference_encoder_backward(dwte, dwpe, widened(dout, N * C), tokens, k.B, k.T, C, NULL);
    float *in_order = (float *)test_memory(Vp * C * sizeof(float));
    memcpy(in_order, start, Vp * C * sizeof(float));
    add_in_order(in_order, dout, tokens, N, C, Vp);
    int *d_tokens = to_device(tokens, N);
    floatX *d_wpe = to_device_floatX(wpe, k.maxT * C), *d_dout = to_device_floatX(dout, N * C);
    float *whole = (float *)test_memory(N * C * sizeof(float)),
          *d_dwpe = to_device(start + Vp * C, k.maxT * C);
    for (size_t i = 0; i < N * C; i++) whole[i] = 0.0f;
    double error = 0.0;  // of the gradients
    bool same = true;    // bits, as by additions in the order of the positions
    for (size_t r = 0; r < k.ranks; r++) {  // the parts add up to the whole
        floatX *d_wte = to_device_floatX(wte + r * Vl * C, Vl * C), *d_out = test_floatX(N * C);
        float *d_dwte = to_device(start + r * Vl * C, Vl * C);
        encoder_forward(d_out, d_tokens, d_wte, r == 0 ? d_wpe : NULL, k.B, k.T, C, r * Vl, Vl,
                        stream);
        encoder_backward(d_dwte, NULL, d_dout, d_tokens, k.B, k.T, C, k.maxT, r * Vl, Vl, true,
                         stream);
        same = same && same_bits(to_host(d_dwte, Vl * C, stream), in_order + r * Vl * C, Vl * C);
        float *part = to_host_floatX(d_out, N * C, stream);
        for (size_t i = 0; i < N * C; i++) whole[i] += part[i];
        error = fmax(error, test_error_float(d_dwte, dwte + r * Vl * C, Vl * C, stream));
    }
    encoder_backward(NULL, d_dwpe, d_dout, d_tokens, k.B, k.T, C, k.maxT, 0, k.V, false, stream);
    error = fmax(error, test_error_float(d_dwpe, dwpe, k.maxT * C, stream));
    for (size_t i = 0; i < k.maxT * C; i++) dwpe[i] *= 2.0;
    encoder_backward(NULL, d_dwpe, d_dout, d_tokens, k.B, k.T, C, k.maxT, 0, k.V, true, stream);
    error = fmax(error, test_error_float(d_dwpe, dwpe, k.maxT * C, stream));
    double error_out = test_error(whole, out, N * C),
           bound_out = (k.ranks > 1 ? 3.0 : 1.0) * FLOATX_ROUNDING + 2e-7;
    check(&lab.checks, error <= 2e-6 && error_out <= bound_out && same,
          "B %zu T %zu maxT %zu C %zu V %zu in %zu parts (" FLOATX_NAME
          "): error %.2e, of gradients %.2e",
          k.B, k.T, k.maxT, k.C, k.V, k.ranks, error_out, error);
    test_release(mark);
}

static Problem make_problem(size_t B, size_t T, size_t C, size_t V) {
    size_t N = B * T;
    int *tokens = (int *)test_memory(N * sizeof(int));
    uint64_t seed = 5;
    for (size_t n = 0; n < N; n++)
        tokens[n] = (int)((0.5 + 0.5 * test_random(&seed)) * (double)(V - 1));
    Problem p = {test_floatX(N * C),
                 to_device(tokens, N),
                 to_device_floatX(test_values(V * C, 0.0, 1.0, 1), V * C),
                 to_device_floatX(test_values(T * C, 0.0, 1.0, 2), T * C),
                 test_floats(V * C),
                 test_floats(T * C),
                 to_device_floatX(test_values(N * C, 0.0, 1.0, 3), N * C),
                 B,
                 T,
                 C,
                 V};
    CUDA_CHECK(cudaMemset(p.dwte, 0, V * C * sizeof(float)));
    CUDA_CHECK(cudaMemset(p.dwpe, 0, T * C * sizeof(float)));
    return p;
}

// Returns the error of one kernel at one shape.
static double row_error(const Row *row, size_t B, size_t T, size_t C, size_t V) {
    size_t mark = test_count, N = B * T;
    Problem p = make_problem(B, T, C, V);
    int *tokens = to_host(p.tokens, N, lab.stream);
    float *wte = to_host_floatX(p.wte, V * C, lab.stream),
          *wpe = to_host_floatX(p.wpe, T * C, lab.stream);
    float *dout = to_host_floatX(p.dout, N * C, lab.stream);
    double *out = test_doubles(N * C), *dwte = test_doubles(V * C), *dwpe = test_doubles(T * C);
    reference_encoder_forward(out, tokens, widened(wte, V * C), widened(wpe, T * C), B, T, C,
                              NULL);
    reference_encoder_backward(dwte, dwpe, widened(dout, N * C), tokens, B, T, C, NULL);
    row->kernel.run(&p, lab_block(&row->kernel));
    double error = row->result == OUT    ? test_error_floatX(p.out, out, N * C, lab.stream)
                   : row->result == DWTE ? test_error_float(p.dwte, dwte, V * C, lab.stream)
                                         : test_error_float(p.dwpe, dwpe, T * C, lab.stream);
    test_release(mark);
    return error;
}

// Checks one token alone, and many sequences of one position: sums of 65536 gradients of one
// sign.
static void check_frequent(void) {
    enum { N = 65536, C = 8 };
    size_t mark = test_count;
    Problem p = make_problem(N, 1, C, 3);
    int *tokens = (int *)test_memory(N * sizeof(int));
    for (size_t n = 0; n < N; n++) tokens[n] = 1;
    float *dout = test_values(N * C, 1.0, 1.0, 3);
    p.tokens = to_device(tokens, N);
    p.dout = to_device_floatX(dout, N * C);
    double *dwte = test_doubles(3 * C), *dwpe = test_doubles(C);
    reference_encoder_backward(dwte, dwpe, widened(dout, N * C), tokens, N, 1, C, NULL);
    tokens3(&p, 0);
    positions2(&p, 0);
    double of_token = test_error_float(p.dwte + C, dwte + C, C, lab.stream);
    double of_position = test_error_float(p.dwpe, dwpe, C, lab.stream);
    check(&lab.checks, of_token < 1e-6 && of_position < 1e-6,
          "one token 65536 times (" FLOATX_NAME "): error %.2e, of its position %.2e", of_token,
          of_position);
    test_release(mark);
}

static void checks(void) {
    static const size_t shapes[][4] = {
        {1, 1, 1, 3}, {2, 7, 18, 40}, {4, 16, 64, 257}, {3, 24, 20, 7}, {2, 33, 768, 50}};
    for (const Row &row : ROWS) {
        double error = 0.0;
        for (const size_t *s : shapes) error = fmax(error, row_error(&row, s[0], s[1], s[2], s[3]));
        lab_check(&lab, &row.kernel, error, row.result == OUT ? FLOATX_ROUNDING + 2e-7 : 2e-6);
    }
    static const Case cases[] = {{1, 1, 1, 1, 3, 1},      {2, 7, 9, 18, 40, 2},
                                 {4, 16, 16, 64, 257, 1}, {3, 24, 30, 20, 100, 3},
                                 {2, 33, 40, 768, 5, 4},  {2, 65, 65, 24, 4000, 8},
                                 {1, 9, 64, 1604, 50, 1}, {3, 1500, 1500, 8, 5, 1}};
    for (const Case &k : cases) check_case(k);
    check_frequent();
}

// Times all kernels. Forward asks for a row of wte and of wpe for each position and writes one;
// wpe need be read only once. Backward asks for the bytes that it must.
static void bench(void) {
    size_t B = lab.cpu ? 8 : 32, T = lab.cpu ? 128 : 1024;
    Problem p = make_problem(B, T, 768, 50257);
    double three = 3.0 * (double)(B * T * p.C * sizeof(floatX));
    for (const Row &row : ROWS) {
        const Row *last = &row;  // of the same operation
        while (last < LAB_LAST(ROWS) && last[1].result == row.result) last++;
        KernelWork must = lab_stated(&lab, &last->kernel, &p);
        lab_bench(&lab, &row.kernel, &p, must, row.result == OUT ? three : must.bytes);
    }
}

int main(int argc, char **argv) { return lab_main(&lab, argc, argv, checks, bench); }
