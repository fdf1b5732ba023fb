// moe.cuh: a mixture of experts, except the experts themselves, which are matrix products.
// lesson: moe
//
// Each token goes to the k of E experts to which its router gives the highest
// probabilities. Its result is the sum of their results, each times a weight:
//   the expert's probability (Switch Transformer, Fedus et al. 2021, with k experts, not one);
//   normalised: its share of the k probabilities (Mixtral, Jiang et al. 2024).
//
// An expert has `slots` places for a sequence, given to tokens in their order. So no token
// depends on later ones, and drops depend neither on other sequences nor on the layout. A
// dropped choice adds nothing: the residual stream carries the token on.
//
// Rows of experts are (E, B, slots, C): contiguous for each expert. Empty places are zeros,
// and stay so in backward. The router is fp32 for any floatX. Of equal logits, the expert
// with the lower number comes first.
//
// defines: Moe, Routing, moe_capacity, moe_rows, take_routing, moe_route, moe_gather,
//          moe_combine, moe_statistics, moe_statistics_count, moe_backward_router,
//          moe_backward_input, moe_backward_weight
#ifndef LLMC_MOE_CUH
#define LLMC_MOE_CUH

#include <math.h>

#include "llmc/kernels/bias.cuh"
#include "llmc/kernels/dropout.cuh"
#include "llmc/kernels/exponential.cuh"
#include "llmc/kernels/packs.cuh"
#include "llmc/trainer/arena.cuh"

static constexpr size_t MOE_NONE = SIZE_MAX;  // no place for a token, no token in a place

struct Moe {
    size_t E, k, slots;  // experts, experts of a token, places of a sequence in an expert
    float balance, z;    // coefficients of the two losses
    bool normalised = false;  // a token's k weights are divided by their sum
};

// The places of the tokens of one layer and micro-batch.
typedef struct {
    float *probs;    // (N, E) of the router
    float *lse;      // (N) log-sum-exp of its logits
    size_t *choice;  // (N, k) experts, the most probable first
    // (N, k) row of the token's copy among those of the experts, or MOE_NONE.
    float *weight;   // (N, k) their probabilities, or these divided by their sum
    size_t *place;
    // (E, B, slots) the copy in a place, as an element of choice, or MOE_NONE.
    size_t *source;
    float *tokens;   // (B, E) tokens that chose an expert, dropped ones included
    float *whole;    // (B, E) the same of all ranks that share the sequences
    float *mass;     // (B, E) the sum of its probabilities
} Routing;

// Returns the places of a sequence in each expert: ceil(factor T k / E), and no more than
// the T that can be needed.
static inline size_t moe_capacity(double factor, size_t T, size_t k, size_t E) {
    double wanted = ceil(factor * (double)T * (double)k / (double)E);
    return wanted < (double)T ? (size_t)wanted : T;
}

// Returns the rows of all experts together.
static inline size_t moe_rows(const Moe &moe, size_t B) {
    return moe.E * B * moe.slots;
}

// Takes the buffers of the routing. c ranks share each sequence.
static inline void take_routing(Arena *arena, Routing *r, const Moe &moe, size_t B, size_t T,
                                size_t c = 1) {
    size_t N = B * T;
    take(arena, r->probs, N * moe.E);
    take(arena, r->lse, N);
    take(arena, r->choice, N * moe.k);
    take(arena, r->weight, N * moe.k);
    take(arena, r->place, N * moe.k);
    take(arena, r->source, moe_rows(moe, B));
    take(arena, r->tokens, B * moe.E);
    r->whole = r->tokens;
    if (c > 1) take(arena, r->whole, B * moe.E);
    take(arena, r->mass, B * moe.E);
}

// A warp per token; its first lane takes the softmax and chooses.
template <int W>
__global__ void __launch_bounds__(ROW_THREADS, 1)
    moe_router_kernel(Routing r, const floatX *x, const floatX *weight, size_t N, size_t C,
                      size_t E, size_t k, bool normalised) {
    size_t n = block_row();
    if (n >= N) return;
    Share s = row_share(C / W);
    float *row = r.probs + n * E, max = -INFINITY, sum = 0.0f;
    for (size_t e = 0; e < E; e++) {
        float sums[W] = {0.0f}, a[W], b[W];
        for (size_t i = s.begin; i < s.end; i += s.step) {
            load_floats<W>(a, x + n * C + i * W);
            load_floats<W>(b, weight + e * C + i * W);
            for (int j = 0; j < W; j++) sums[j] += a[j] * b[j];
        }
        float logit = row_sum(sum_of<W>(sums));
        max = larger(max, logit);
        if (row_lane() == 0) row[e] = logit;
    }
    if (row_lane() != 0) return;
    for (size_t j = 0; j < k; j++) {
        size_t best = MOE_NONE;
        for (size_t e = 0; e < E; e++) {
            bool taken = false;
            for (size_t i = 0; i < j; i++) taken |= r.choice[n * k + i] == e;
            if (!taken && (best == MOE_NONE || row[e] > row[best])) best = e;
        }
        r.choice[n * k + j] = best;
    }
    for (size_t e = 0; e < E; e++) sum += row[e] = exponential(row[e] - max);
    for (size_t e = 0; e < E; e++) row[e] /= sum;
    r.lse[n] = max + logf(sum);
    float *mine = r.weight + n * k, chosen = 0.0f;
    for (size_t j = 0; j < k; j++) chosen += mine[j] = row[r.choice[n * k + j]];
    for (size_t j = 0; j < k && normalised; j++) mine[j] /= chosen;
}

// A warp per sequence and expert. Each lane takes a piece of the sequence. The lanes count,
// then give places.
__global__ void __launch_bounds__(ROW_THREADS, 1)
    moe_place_kernel(Routing r, Moe moe, size_t B, size_t T) {
    size_t pair = block_row(), lane = row_lane(), k = moe.k;
    if (pair >= B * moe.E) return;
    size_t b = pair / moe.E, e = pair % moe.E;
    size_t piece = CEIL_DIV(T, (size_t)ROW_LANES), count = 0;
    size_t begin = b * T + (lane * piece < T ? lane * piece : T);
    size_t end = begin + piece < (b + 1) * T ? begin + piece : (b + 1) * T;
    size_t *source = r.source + (e * B + b) * moe.slots;
    float mass = 0.0f;
    for (size_t n = begin; n < end; n++) {
        for (size_t i = n * k; i < (n + 1) * k; i++) count += r.choice[i] == e;
        mass += r.probs[n * moe.E + e];
    }
    size_t place = lanes_before(count);
    for (size_t i = begin * k; i < end * k; i++) {
        if (r.choice[i] != e) continue;
        r.place[i] = place < moe.slots ? (e * B + b) * moe.slots + place : MOE_NONE;
        if (place < moe.slots) source[place] = i;
        place++;
    }
    size_t all = ROW_LANES == 1 ? place
                                : (size_t)__shfl_sync(0xFFFFFFFFu, (unsigned)place, 31);
    for (size_t i = all + lane; i < moe.slots; i += ROW_LANES) source[i] = MOE_NONE;
    mass = row_sum(mass);
    if (lane == 0) {
        r.tokens[pair] = (float)all;
        r.mass[pair] = mass;
    }
}

// Routes x (N, C) by weight (E, C).
static inline void moe_route(const Routing &r, const floatX *x, const floatX *weight,
                             const Moe &moe, size_t B, size_t T, size_t C,
                             cudaStream_t stream) {
    size_t N = B * T;
    kernel_cost(KERNEL_ELEMENTWISE, N * C, sizeof(floatX), 2.0 * (double)moe.E);
    by_packs(C, [&](auto W) {
        LAUNCH(moe_router_kernel<W>, row_blocks(N), ROW_THREADS, stream)
        (r, x, weight, N, C, moe.E, moe.k, moe.normalised);
    });
    kernel_cost(KERNEL_ELEMENTWISE, N * moe.E,
                (double)(moe.k * sizeof(size_t) + sizeof(float)), 1);
    LAUNCH(moe_place_kernel, row_blocks(B * moe.E), ROW_THREADS, stream)(r, moe, B, T);
}

// A warp per place.
template <int W>
__global__ void __launch_bounds__(ROW_THREADS, 1)
    moe_gather_kernel(floatX *rows, const floatX *x, Routing r, Moe moe, size_t count,
                      size_t C, bool weighted) {
    size_t row = block_row();
    if (row >= count) return;
    size_t i = r.source[row];
    bool empty = i == MOE_NONE;
    float factor = weighted && !empty ? r.weight[i] : 1.0f;
    Share s = row_share(C / W);
    for (size_t c = s.begin; c < s.end; c += s.step) {
        float a[W] = {0.0f};
        if (!empty) load_floats<W>(a, x + i / moe.k * C + c * W);
        for (int j = 0; j < W; j++) a[j] *= factor;
        store_floats<W>(rows + row * C + c * W, a);
    }
}

// Gathers into rows (E, B, slots, C) each place's token of x (N, C). weighted: multiplies
// it by the weight of its expert. This turns the gradient of moe_combine's result into the
// gradient of the experts' results.
static inline void moe_gather(floatX *rows, const floatX *x, const Routing &r,
                              const Moe &moe, size_t B, size_t C, bool weighted,
                              cudaStream_t stream) {
    size_t count = moe_rows(moe, B);
    kernel_cost(KERNEL_ELEMENTWISE, count * C, 2 * sizeof(floatX), 1);
    by_packs(C, [&](auto W) {
        LAUNCH(moe_gather_kernel<W>, row_blocks(count), ROW_THREADS, stream)
        (rows, x, r, moe, count, C, weighted);
    });
}

// A warp per token.
template <int W>
__global__ void __launch_bounds__(ROW_THREADS, 1)
    moe_combine_kernel(floatX *out, const floatX *residual, const floatX *rows, Routing r,
                       Moe moe, size_t N, size_t C, Dropout drop) {
    size_t n = block_row();
    if (n >= N) return;
    Share s = row_share(C / W);
    for (size_t c = s.begin; c < s.end; c += s.step) {
        float sum[W] = {0.0f}, a[W];
        for (size_t i = n * moe.k; i < (n + 1) * moe.k; i++) {
            if (r.place[i] == MOE_NONE) continue;
            float factor = r.weight[i];
            load_floats<W>(a, rows + r.place[i] * C + c * W);
            for (int j = 0; j < W; j++) sum[j] += factor * a[j];
        }
        if (drop.threshold) dropout_mask<W>(sum, drop, n, c * W, C);
        for (int j = 0; j < W; j++) a[j] = 0.0f;
        if (residual) load_floats<W>(a, residual + n * C + c * W);
        for (int j = 0; j < W; j++) a[j] += sum[j];
        store_floats<W>(out + n * C + c * W, a);
    }
}

// Computes out (N, C) = residual + mask * the sum of the results of each token's experts,
// times their weights. rows has the results. residual NULL: none.
static inline void moe_combine(floatX *out, const floatX *residual, const floatX *rows,
                               const Routing &r, const Moe &moe, size_t N, size_t C,
                               cudaStream_t stream, Dropout drop) {
    kernel_cost(KERNEL_RESIDUAL, N * C, (double)(2 + moe.k) * sizeof(floatX),
                2.0 * (double)moe.k);
    by_packs(C, [&](auto W) {
        LAUNCH(moe_combine_kernel<W>, row_blocks(N), ROW_THREADS, stream)
        (out, residual, rows, r, moe, N, C, drop);
    });
}

// Returns the elements of the statistics of a layer.
static inline size_t moe_statistics_count(const Moe &moe) {
    return 4 * moe.E;
}

// A thread per expert. For large logits each looks at every E-th token.
__global__ void moe_statistics_kernel(double *sums, Routing r, Moe moe, size_t B, size_t T,
                                      size_t c) {
    size_t e = threadIdx.x, E = moe.E;
    for (size_t b = 0; b < B; b++) {
        double tokens = (double)r.tokens[b * E + e], slots = (double)moe.slots;
        double share = (double)r.whole[b * E + e] / (double)(c * T * moe.k);
        sums[e] += tokens;
        sums[E + e] += tokens > slots ? tokens - slots : 0.0;
        sums[2 * E + e] += (double)E * share * (double)r.mass[b * E + e];
    }
    for (size_t n = e; n < B * T; n += E)
        sums[3 * E + e] += (double)r.lse[n] * (double)r.lse[n];
}

// Adds to sums (4, E), for each expert: the tokens that chose it, the dropped ones among them,
// its share of the balance loss, a share of the loss of large logits. Both losses are summed
// over tokens and lack their coefficients. c ranks share each sequence.
static inline void moe_statistics(double *sums, const Routing &r, const Moe &moe, size_t B,
                                  size_t T, cudaStream_t stream, size_t c = 1) {
    kernel_cost(KERNEL_ELEMENTWISE, B * moe.E, 12, 1);
    LAUNCH(moe_statistics_kernel, 1, (unsigned)moe.E, stream)(sums, r, moe, B, T, c);
}

// A warp per token: dlogits (N, E).
template <int W>
__global__ void __launch_bounds__(ROW_THREADS, 1)
    moe_backward_router_kernel(float *dlogits, const floatX *dout, const floatX *rows,
                               Routing r, Moe moe, float dloss, size_t N, size_t T,
                               size_t C) {
    size_t n = block_row(), E = moe.E, lane = row_lane();
    if (n >= N) return;
    Share s = row_share(C / W);
    const float *p = r.probs + n * E;
    float *d = dlogits + n * E, mean = 0.0f;  // first of the probabilities
    float along = 0.0f, chosen = 0.0f;
    for (size_t i = n * moe.k; i < (n + 1) * moe.k; i++) chosen += p[r.choice[i]];
    if (!moe.normalised) chosen = 1.0f;
    for (size_t e = 0; e < E && lane == 0; e++) {
        float share = r.whole[n / T * E + e] / (float)(T * moe.k);
        d[e] = moe.balance * (float)E * share * dloss;
    }
    for (size_t i = n * moe.k; i < (n + 1) * moe.k; i++) {
        if (r.place[i] == MOE_NONE) continue;
        float sums[W] = {0.0f}, a[W], b[W];
        for (size_t c = s.begin; c < s.end; c += s.step) {
            load_floats<W>(a, dout + n * C + c * W);
            load_floats<W>(b, rows + r.place[i] * C + c * W);
            for (int j = 0; j < W; j++) sums[j] += a[j] * b[j];
        }
        float sum = row_sum(sum_of<W>(sums));
        if (lane == 0) d[r.choice[i]] += sum / chosen;
        along += r.weight[i] * sum;
    }
    if (lane != 0) return;
    // A weight that is a share of the sum over the chosen falls as another's grows.
    for (size_t i = n * moe.k; i < (n + 1) * moe.k && moe.normalised; i++)
        d[r.choice[i]] -= along / chosen;
    for (size_t e = 0; e < E; e++) mean += p[e] * d[e];
    for (size_t e = 0; e < E; e++)
        d[e] = p[e] * (d[e] - mean + 2.0f * moe.z * r.lse[n] * dloss);
}

// Computes dlogits (N, E), the gradient of the router's logits. dout (N, C) is the gradient
// of moe_combine's sum, and rows are the experts' results. Adds the gradients of the two
// losses, for a loss that is dloss times a sum over tokens:
//   balance  For a sequence, E times the sum over experts of f P. f is the expert's share of
//            the choices and has no gradient. P is its mean probability (Fedus et al. 2021,
//            equations 4 to 6).
//   z        The lse squared (Zoph et al. 2022, 5).
static inline void moe_backward_router(float *dlogits, const floatX *dout,
                                       const floatX *rows, const Routing &r, const Moe &moe,
                                       float dloss, size_t B, size_t T, size_t C,
                                       cudaStream_t stream) {
    size_t N = B * T;
    kernel_cost(KERNEL_ELEMENTWISE, N * C, (double)(1 + moe.k) * sizeof(floatX),
                2.0 * (double)moe.k);
    by_packs(C, [&](auto W) {
        LAUNCH(moe_backward_router_kernel<W>, row_blocks(N), ROW_THREADS, stream)
        (dlogits, dout, rows, r, moe, dloss, N, T, C);
    });
}

// A warp per token.
template <int W>
__global__ void __launch_bounds__(ROW_THREADS, 1)
    moe_backward_input_kernel(floatX *dx, const floatX *drows, const float *dlogits,
                              const floatX *weight, Routing r, Moe moe, size_t N,
                              size_t C) {
    size_t n = block_row();
    if (n >= N) return;
    Share s = row_share(C / W);
    for (size_t c = s.begin; c < s.end; c += s.step) {
        float sum[W] = {0.0f}, a[W];
        for (size_t i = n * moe.k; i < (n + 1) * moe.k; i++) {
            if (r.place[i] == MOE_NONE) continue;
            load_floats<W>(a, drows + r.place[i] * C + c * W);
            for (int j = 0; j < W; j++) sum[j] += a[j];
        }
        for (size_t e = 0; e < moe.E; e++) {
            load_floats<W>(a, weight + e * C + c * W);
            for (int j = 0; j < W; j++) sum[j] += dlogits[n * moe.E + e] * a[j];
        }
        store_floats<W>(dx + n * C + c * W, sum);
    }
}

// Computes dx (N, C), the gradient of the layer's input. drows has the gradients of the
// experts' inputs; the router adds its own.
static inline void moe_backward_input(floatX *dx, const floatX *drows, const float *dlogits,
                                      const floatX *weight, const Routing &r,
                                      const Moe &moe, size_t N, size_t C,
                                      cudaStream_t stream) {
    kernel_cost(KERNEL_ELEMENTWISE, N * C, (double)(1 + moe.k) * sizeof(floatX),
                (double)(moe.k + 2 * moe.E));
    by_packs(C, [&](auto W) {
        LAUNCH(moe_backward_input_kernel<W>, row_blocks(N), ROW_THREADS, stream)
        (dx, drows, dlogits, weight, r, moe, N, C);
    });
}

// A thread per W elements of the weight's gradient and chunk of the rows, as
// bias_partial_kernel.
template <int W>
__global__ void __launch_bounds__(BIAS_THREADS)
    moe_weight_kernel(float *partial, const float *dlogits, const floatX *x, size_t N,
                      size_t C, size_t E, size_t chunk_rows) {
    size_t at = ((size_t)blockIdx.x * BIAS_THREADS + threadIdx.x) * W, e = at / C;
    if (at >= E * C) return;
    size_t begin = blockIdx.y * chunk_rows;
    size_t end = begin + chunk_rows < N ? begin + chunk_rows : N;
    float sum[W] = {0.0f}, a[W];
    for (size_t n = begin; n < end; n++) {
        load_floats<W>(a, x + n * C + at % C);
        for (int j = 0; j < W; j++) sum[j] += dlogits[n * E + e] * a[j];
    }
    store_floats<W>(partial + blockIdx.y * E * C + at, sum);
}

// Computes dweight (E, C) = or += dlogits (N, E)^T x (N, C). scratch: bias_backward_scratch(N,
// E * C) floats.
static inline void moe_backward_weight(float *dweight, float *scratch, const float *dlogits,
                                       const floatX *x, size_t N, size_t C, size_t E,
                                       bool accumulate, cudaStream_t stream) {
    size_t chunk_rows = bias_chunk_rows(N), chunks = CEIL_DIV(N, chunk_rows);
    kernel_cost(KERNEL_ELEMENTWISE, N * C, sizeof(floatX), 2.0 * (double)E);
    by_packs(C, [&](auto W) {
        dim3 grid((unsigned)CEIL_DIV(E * C, (size_t)BIAS_THREADS * W), (unsigned)chunks);
        LAUNCH(moe_weight_kernel<W>, grid, BIAS_THREADS, stream)
        (scratch, dlogits, x, N, C, E, chunk_rows);
    });
    column_sums(dweight, NULL, scratch, chunks, E * C, E * C, accumulate, stream);
}

#endif
