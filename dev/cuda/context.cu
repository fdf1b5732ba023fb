// context.cu: the kernels of context parallelism, llmc/kernels/context.cuh. These are attention
// of a pair of ranks, forward and backward, the merge of partial outputs, and the orders of
// Ulysses' all-to-all. Checked against plain loops in double, which know positions and masks but
// neither pairs nor halves. The steps of a ring:
//   1  Own keys, causal.
//   2  All queries by the first half of the keys.
//   3  The last half of the queries by all keys.
#include "dev/cuda/bench.h"

#include "llmc/kernels/context.cuh"
#include "llmc/reference_layers.h"

static Lab lab;

enum { MAX_RANKS = 8 };

// The ranks of a sequence, with B T/c rows each.
typedef struct {
    size_t c, B, T, A, NH;
    bool zigzag;
    Dropout drop;
} Shape;

// A rank: its buffers, and a step that is to be run.
typedef struct {
    Shape s;
    Ring ring;
    RingStep step;
    floatX *qkv, *dout, *out, *joined;  // [B,T/c,3A], [B,T/c,A] twice, [B,T/c,A] in another order
    float *lse, *dot;                   // [B,NH,T/c]
} Rank;

static void forward(const Rank *r, unsigned) {
    attention_pair_forward(r->ring, r->lse, r->qkv, r->step, lab.stream, r->s.drop);
}
static void backward(const Rank *r, unsigned) {
    attention_pair_backward(r->ring, r->dot, r->dout, r->out, r->lse, r->qkv, r->step, lab.stream,
                            r->s.drop);
}
static void merge(const Rank *r, unsigned) {
    attention_merge(r->ring, r->lse, r->step, lab.stream);
}
static void cut(const Rank *r, unsigned) {
    heads_cut(r->joined, r->out, r->s.B * r->s.T / r->s.c, 1, r->s.A, r->s.c, lab.stream);
}
static void join(const Rank *r, unsigned) {
    tokens_join(r->joined, r->out, r->s.B, r->s.T, r->s.A / r->s.c, r->s.c, r->s.zigzag,
                lab.stream);
}

enum { FORWARD, BACKWARD = FORWARD + 3, MERGE = BACKWARD + 3, HEADS, TOKENS, KERNELS };
static const LabKernel CONTEXT[KERNELS] = {
    {"attention pair", 1, "own keys, causal", forward, 1},
    {"attention pair", 2, "all queries, first half of the keys", forward, 1},
    {"attention pair", 3, "last half of the queries, all keys", forward, 1},
    {"attention pair backward", 1, "own keys, causal", backward, 1},
    {"attention pair backward", 2, "all queries, first half of the keys", backward, 1},
    {"attention pair backward", 3, "last half of the queries, all keys", backward, 1},
    {"attention merge", 1, "a warp a head of a row (llmc)", merge, ROW_THREADS},
    {"ulysses heads", 1, "packs of a head's channels (llmc)", cut, ELEMENT_THREADS},
    {"ulysses tokens", 1, "packs of a row (llmc)", join, ELEMENT_THREADS},
};

// Returns the number of a step's kernel: own keys, half the keys (contiguous: all), half the
// queries.
static int step_kind(const RingStep &step) {
    return step.step == 0 ? 0 : step.pair.Tq == step.T ? 1 : 2;
}

static Rank rank_make(const Shape &s, size_t rank) {
    Context part = {s.T, s.c, rank, true, s.zigzag, RECOMPUTE_NONE};
    size_t T = s.T / s.c, n = s.B * T * s.A;
    Rank r = Rank();
    r.s = s, r.step = ring_step(part, 0, s.B, T, s.A, s.NH);
    for (int i = 0; i < 2; i++)
        r.ring.kv[i] = test_floatX(2 * n), r.ring.dkv[i] = test_floats(2 * n);
    r.ring.sum = test_floats(n), r.ring.part = test_floats(n),
    r.ring.part_lse = test_floats(s.B * s.NH * T);
    r.ring.part_dkv = test_floats(2 * n);
    r.qkv = test_floatX(3 * n), r.dout = test_floatX(n), r.out = test_floatX(n),
    r.joined = test_floatX(n);
    r.lse = test_floats(s.B * s.NH * T), r.dot = test_floats(s.B * s.NH * T);
    return r;
}

// Goes to a step: its keys and values become their owner's.
static void rank_step(Rank *ranks, size_t rank, size_t step) {
    Rank *r = &ranks[rank], *owner = &ranks[(rank + r->s.c - step) % r->s.c];
    Context part = {r->s.T, r->s.c, rank, true, r->s.zigzag, RECOMPUTE_NONE};
    size_t T = r->s.T / r->s.c, A = r->s.A;
    r->step = ring_step(part, step, r->s.B, T, A, r->s.NH);
    columns_move<false>(r->ring.kv[step % 2], 2 * A, owner->qkv + A, 3 * A, r->s.B, T, 0, T,
                        2 * A, lab.stream);
}

// Returns rows of the whole [B,T,width] that the rank has, in its order.
static double *rows_of(const Shape &s, const Rank *r, const double *whole, size_t width) {
    size_t T = s.T / s.c;
    double *part = test_doubles(s.B * T * width);
    for (size_t i = 0; i < s.B * T; i++) {
        size_t from = i / T * s.T + tokens_position(r->step.mine, i % T);
        memcpy(part + i * width, whole + from * width, width * sizeof *part);
    }
    return part;
}

static floatX *to_rank(floatX *device, const double *rows, size_t n) {
    size_t mark = test_count;
    float *narrow = (float *)test_memory(n * sizeof(float));
    for (size_t i = 0; i < n; i++) narrow[i] = (float)rows[i];
    copy_to_floatX(device, narrow, n);
    test_release(mark);
    return device;
}

// Computes plain attention of a step's queries by the keys that they may see, without knowing
// which halves these are. Writes out[B,T/c,A] and lse[B,NH,T/c]. Leaves rows that see no key at
// 0, and at minus infinity.
static void plain_pair(double *out, double *lse, const Rank *r, const double *qkv) {
    const Shape &s = r->s;
    size_t T = s.T / s.c, HS = s.A / s.NH;
    double scale = 1.0 / sqrt((double)HS), *p = test_doubles(T);
    for (size_t i = 0; i < s.B * s.NH * T; i++) {
        size_t b = i / T / s.NH, h = i / T % s.NH, q = tokens_position(r->step.mine, i % T),
               seen = 0;
        const double *query = qkv + (b * s.T + q) * 3 * s.A + h * HS;
        double *y = out + (b * T + i % T) * s.A + h * HS, largest = -INFINITY, sum = 0;
        for (size_t j = 0; j < T; j++) {
            size_t k = tokens_position(r->step.others, j);
            p[j] = -INFINITY;
            if (k > q) continue;
            const double *key = qkv + (b * s.T + k) * 3 * s.A + s.A + h * HS;
            p[j] = 0, seen++;
            for (size_t x = 0; x < HS; x++) p[j] += query[x] * key[x] * scale;
            largest = fmax(largest, p[j]);
        }
        for (size_t j = 0; j < T && seen; j++) sum += p[j] = exp(p[j] - largest);
        lse[i] = seen ? largest + log(sum) : -INFINITY;
        for (size_t j = 0; j < T && seen; j++) {
            size_t k = tokens_position(r->step.others, j);
            const double *value = qkv + (b * s.T + k) * 3 * s.A + 2 * s.A + h * HS;
            double factor =
                k > q ? 0 : p[j] / sum * reference_attention_factor(&s.drop, b, h, q, k, s.T);
            for (size_t x = 0; x < HS; x++) y[x] += factor * value[x];
        }
    }
}

// Returns the largest error of the rows of a step's queries, of [B,T/c,width] on the device.
static double error_of(const Rank *r, const float *device, const double *want, size_t width) {
    size_t T = r->s.T / r->s.c, first = r->step.pair.q, count = r->step.pair.Tq, n = 0,
           mark = test_count;
    float *got = to_host(device, r->s.B * T * width, lab.stream);
    double *rows = test_doubles(r->s.B * count * width);
    for (size_t i = 0; i < r->s.B * count * width; i++, n++) {
        size_t from = (i / width / count * T + first + i / width % count) * width + i % width;
        got[n] = got[from], rows[n] = want[from];  // from >= n
    }
    double error = test_error(got, rows, n);
    test_release(mark);
    return error;
}

// Checks all ranks of a sequence, every step, forward and backward.
static void check_ring(Shape s, double errors[KERNELS]) {
    size_t mark = test_count, T = s.T / s.c, n = s.B * s.T * s.A;
    const float *values = test_values(3 * n, 0, 1.5, 7), *gradients = test_values(n, 0, 1, 8);
    double *qkv = widened(values, 3 * n), *dout = widened(gradients, n),
           *dqkv = test_doubles(3 * n);
    double *out = test_doubles(n), *att = test_doubles(s.B * s.NH * s.T * s.T), worst[3] = {0};
    reference_attention_forward(out, att, qkv, s.B, s.T, s.A, s.NH, s.drop, NULL);
    reference_attention_backward(dqkv, dout, qkv, att, s.B, s.T, s.A, s.NH, s.drop, NULL);
    Rank ranks[MAX_RANKS];
    float *dkv[MAX_RANKS];  // of each rank's keys
    for (size_t i = 0; i < s.c; i++) {
        ranks[i] = rank_make(s, i), dkv[i] = ranks[i].ring.dkv[0];
        to_rank(ranks[i].qkv, rows_of(s, &ranks[i], qkv, 3 * s.A), 3 * n / s.c);
        to_rank(ranks[i].dout, rows_of(s, &ranks[i], dout, s.A), n / s.c);
    }
    for (size_t i = 0; i < s.c; i++) {
        Rank *r = &ranks[i];
        for (size_t step = 0; step < s.c; step++) {
            size_t inner = test_count;
            double *part = test_doubles(n / s.c), *lse = test_doubles(s.B * s.NH * T);
            rank_step(ranks, i, step);
            plain_pair(part, lse, r, qkv);
            forward(r, 0);
            double error =
                r->step.pair.Tq ? error_of(r, step ? r->ring.part : r->ring.sum, part, s.A) : 0;
            int kind = FORWARD + step_kind(r->step);
            errors[kind] = fmax(errors[kind], error), worst[0] = fmax(worst[0], error);
            merge(r, 0);
            test_release(inner);
        }
        double *want = rows_of(s, r, out, s.A);
        double error = test_error_float(r->ring.sum, want, n / s.c, lab.stream);
        errors[MERGE] = fmax(errors[MERGE], error), worst[1] = fmax(worst[1], error);
        to_rank(r->out, want, n / s.c);
    }
    for (size_t step = 0; step < s.c; step++) {
        for (size_t i = 0; i < s.c; i++) {
            Rank *r = &ranks[i];
            rank_step(ranks, i, step);
            r->ring.dkv[step % 2] = dkv[(i + s.c - step) % s.c];
            backward(r, 0);
            ring_add(r->ring, r->step, lab.stream);
            CUDA_CHECK(cudaStreamSynchronize(lab.stream));
        }
    }
    for (size_t i = 0; i < s.c; i++) {
        double *want = rows_of(s, &ranks[i], dqkv, 3 * s.A);
        double *q = test_doubles(n / s.c), *kv = test_doubles(2 * n / s.c);
        for (size_t j = 0; j < 3 * n / s.c; j++) {
            size_t row = j / (3 * s.A), x = j % (3 * s.A);
            if (x < s.A) q[row * s.A + x] = want[j];
            else kv[row * 2 * s.A + x - s.A] = want[j];
        }
        double error = test_error_float(ranks[i].ring.sum, q, n / s.c, lab.stream);
        error = fmax(error, test_error_float(dkv[i], kv, 2 * n / s.c, lab.stream));
        worst[2] = fmax(worst[2], error);
    }
    for (int kind = 0; kind < (s.zigzag && s.c > 1 ? 3 : 1); kind++)
        errors[BACKWARD + kind] = fmax(errors[BACKWARD + kind], worst[2]);
    double bound = sizeof(floatX) == 4 ? 3e-6 : 2.5e-2,
           bound_grad = sizeof(floatX) == 4 ? 1e-5 : 5e-2;
    check(&lab.checks, worst[0] <= bound && worst[1] <= bound && worst[2] <= bound_grad,
          "c %zu, %s, B %zu T %zu NH %zu HS %zu%s: pairs %.1e, merged %.1e (bound %.1e), "
          "gradients %.1e (%.1e)",
          s.c, s.zigzag ? "zigzag" : "contiguous", s.B, s.T, s.NH, s.A / s.NH,
          s.drop.threshold ? ", dropout" : "", worst[0], worst[1], bound, worst[2], bound_grad);
    test_release(mark);
}

// Checks Ulysses' four orders. Cut, exchanged and joined, the rows of c ranks must be every token
// in order, with 1/c of the heads. The way back must restore them.
static void check_ulysses(size_t c, bool zigzag, size_t B, size_t T, size_t parts, size_t A,
                          double errors[KERNELS]) {
    size_t mark = test_count, held = T / c, n = B * held * parts * A, piece = n / c;
    float *whole = test_values(n * c, 0, 1, 9);  // [B,T,parts,A]
    floatX *leaving[MAX_RANKS], *local[MAX_RANKS], *arriving = test_floatX(n),
                                                   *joined = test_floatX(n);
    size_t wrong[2] = {0};
    for (size_t i = 0; i < c; i++) {
        float *rows = (float *)test_memory(n * sizeof(float));
        Tokens tokens = tokens_of(T, c, i, zigzag);
        for (size_t j = 0; j < B * held; j++)
            memcpy(rows + j * parts * A,
                   whole + (j / held * T + tokens_position(tokens, j % held)) * parts * A,
                   parts * A * sizeof(float));
        local[i] = to_device_floatX(rows, n), leaving[i] = test_floatX(n);
        heads_cut(leaving[i], local[i], B * held, parts, A, c, lab.stream);
    }
    floatX *back = test_floatX(n * c);  // [to][from][piece]
    for (size_t to = 0; to < c; to++) {
        for (size_t from = 0; from < c; from++)
            CUDA_CHECK(cudaMemcpyAsync(arriving + from * piece, leaving[from] + to * piece,
                                       piece * sizeof(floatX), cudaMemcpyDeviceToDevice,
                                       lab.stream));
        tokens_join(joined, arriving, B, T, parts * A / c, c, zigzag, lab.stream);
        float *got = to_host_floatX(joined, n, lab.stream);
        for (size_t j = 0; j < n; j++) {
            size_t x = j % (A / c), part = j / (A / c) % parts, row = j / (A / c) / parts;
            wrong[0] += got[j] != whole[(row * parts + part) * A + to * (A / c) + x];
        }
        tokens_cut(arriving, joined, B, T, parts * A / c, c, zigzag, lab.stream);
        for (size_t from = 0; from < c; from++)
            CUDA_CHECK(cudaMemcpyAsync(back + (from * c + to) * piece, arriving + from * piece,
                                       piece * sizeof(floatX), cudaMemcpyDeviceToDevice,
                                       lab.stream));
    }
    for (size_t i = 0; i < c; i++) {
        heads_join(joined, back + i * n, B * held, parts, A, c, lab.stream);
        float *got = to_host_floatX(joined, n, lab.stream),
              *want = to_host_floatX(local[i], n, lab.stream);
        for (size_t j = 0; j < n; j++) wrong[1] += got[j] != want[j];
    }
    errors[HEADS] += (double)wrong[1], errors[TOKENS] += (double)wrong[0];
    check(&lab.checks, wrong[0] == 0 && wrong[1] == 0,
          "ulysses, c %zu, %s, B %zu T %zu, %zu x %zu channels: all tokens in order, and back", c,
          zigzag ? "zigzag" : "contiguous", B, T, parts, A);
    test_release(mark);
}

static void checks(void) {
    Dropout none = Dropout(), some = dropout_for(dropout_make(0.3, 7, 2, 9), DROPOUT_SCORES, 3);
    double errors[KERNELS] = {0};
    for (int zigzag = 0; zigzag < 2; zigzag++) {
        check_ring({1, 2, 10, 18, 3, zigzag > 0, none}, errors);  // heads of 6: nothing divides
        check_ring({2, 2, 20, 18, 3, zigzag > 0, none}, errors);
        check_ring({3, 1, 42, 64, 2, zigzag > 0, none}, errors);
        check_ring({4, 2, 136, 64, 1, zigzag > 0, none}, errors);
        check_ring({2, 1, 260, 128, 1, zigzag > 0, none}, errors);  // beyond a tile of 64 rows
        check_ring({8, 1, 16, 96, 1, zigzag > 0, none}, errors);    // T = 2c
        check_ring({2, 2, 64, 48, 2, zigzag > 0, some}, errors);
        check_ring({4, 1, 64, 128, 2, zigzag > 0, some}, errors);
        check_ulysses(2, zigzag > 0, 2, 12, 3, 12, errors);
        check_ulysses(4, zigzag > 0, 1, 16, 1, 64, errors);
        check_ulysses(3, zigzag > 0, 2, 18, 3, 48, errors);
    }
    for (int i = 0; i < KERNELS; i++) {
        bool gradient = i >= BACKWARD && i < MERGE, order = i >= HEADS;
        double bound = sizeof(floatX) == 4 ? (gradient ? 1e-5 : 3e-6) : (gradient ? 5e-2 : 2.5e-2);
        lab_check(&lab, &CONTEXT[i], errors[i], order ? 0 : bound);
    }
}

// Times one of two ranks with a layer of GPT-2 124M, zigzag. Rank 0 meets keys of a later rank,
// rank 1 of an earlier one.
static void bench(void) {
    Shape s = {2, 1, lab.cpu ? (size_t)256 : 8192, 768, 12, true, Dropout()};
    Rank ranks[2] = {rank_make(s, 0), rank_make(s, 1)};
    size_t n = s.B * s.T / s.c * s.A;
    for (Rank &r : ranks)
        r.qkv = lab_fill(&lab, 3 * n), r.dout = lab_fill(&lab, n), r.out = lab_fill(&lab, n);
    for (int i = 0; i < KERNELS; i++) {
        bool pair = i < MERGE;
        size_t rank = pair && (i - FORWARD) % 3 == 1, step = pair ? (i - FORWARD) % 3 != 0 : 1;
        rank_step(ranks, rank, 0), forward(&ranks[rank], 0);  // the lse that follows exists
        if (step) rank_step(ranks, rank, step), forward(&ranks[rank], 0);
        KernelWork work = lab_stated(&lab, &CONTEXT[i], &ranks[rank]);
        lab_bench(&lab, &CONTEXT[i], &ranks[rank], work, 0.0);
    }
}

int main(int argc, char **argv) { return lab_main(&lab, argc, argv, checks, bench); }
