// train_gpt_3d.cu: train_gpt_pp.cu plus data parallelism with a sharded optimizer (ZeRO stage 1, Rajbhandari et al.
// 2020): the full grid of t x d x p ranks. The last of four trainers:
//   train_gpt.cu -> train_gpt_tp.cu (tensor) -> train_gpt_pp.cu (pipeline) -> train_gpt_3d.cu (data, sharded optimizer)
//
// The d replicas share the global batch. A bucket of gradients (the embeddings, each layer, ln_f) is summed over them
// by a reduce-scatter as soon as its last micro-batch is through: each data rank then owns 1/d of every bucket,
// whatever tensors that cuts, updates it, and the weights are gathered again while the next forward runs.
//
// The layers are dealt to p stages in v chunks each: global chunk c*p + s is chunk c of stage s. A stage runs the list
// of steps that llmc/pipeline.h gives it; activations go up and gradients down over links with streams of their own.
//
// Each layer is shared by t ranks. QKV and FC are split by columns, the two projections and the vocabulary by rows: a
// rank has 1/t of the heads with A = C/t channels, F = 4C/t hidden units, Vl = Vp/t rows of wte. Operators f and g
// stand where the paper draws them. Under sequence parallelism layernorms, residuals and what they keep are cut over
// the Nl = N/t tokens of a rank.
//
// Letters: B micro-batch (sequences), T sequence length, N = B*T tokens, C channels, L layers, NH heads with A channels
// together, F hidden units of the MLP, V vocabulary, Vp the same padded to a multiple of 128, Vl the part of it that a
// rank holds. A shape stands behind every pointer. Weights are [in, out], as in Hugging Face's GPT-2: w[QKVW] is one of
// a layer, dw[QKVW] its gradient; llmc/model.h lists them.

// Trainer: what surrounds training: options, memory, data, optimizer, checkpoints, log, timeline
#include "llmc/trainer.cuh"
// replicas_check: are copies that several ranks hold still equal?
#include "llmc/trainer/replicas.cuh"
// PipelinePlan: the layers of this stage, and its list of steps: which forward or backward when
#include "llmc/zero_bubble.h"
// the kernels
#include "llmc/kernels/attention.cuh"
#include "llmc/kernels/classifier.cuh"
#include "llmc/kernels/encoder.cuh"
#include "llmc/kernels/gelu.cuh"
#include "llmc/kernels/layernorm.cuh"
#include "llmc/kernels/matmul.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// The model and its memory

// What the forward pass of one layer keeps for its backward pass.
struct LayerActs {
    floatX *ln1;                   // (Nl, C)
    float *ln1_mean, *ln1_rstd;    // (Nl)
    floatX *qkv;                   // (N, 3A)
    float *lse;                    // (B, NH, T) of attention: log-sum-exp of the scores
    floatX *atty;                  // (N, A)
    floatX *residual2;             // (Nl, C) residual stream between the two halves
    floatX *ln2;                   // (Nl, C)
    float *ln2_mean, *ln2_rstd;    // (Nl)
    floatX *fch, *fch_gelu;        // (N, F) before and after GELU
};

// What the input half of one layer's backward leaves for the weight half, which a schedule may put off to a later step.
enum { INPUT_HALF = 1, WEIGHT_HALF = 2, BOTH_HALVES = INPUT_HALF | WEIGHT_HALF };
struct LayerGrads {
    floatX *dout, *dresidual2;     // (Nl, C) of the layer's output and of residual2, if the halves are two steps
    floatX *dfch, *dqkv;           // (N, F), (N, 3A); the model's own if not
};

// What the forward pass of one micro-batch through one chunk of layers keeps until its backward pass.
struct Acts {
    LayerActs *layers;             // [L] of the chunk
    LayerGrads *grads;             // [L]
    floatX **residual;             // [L + 1] of (Nl, C): input of layer l; the last is the chunk's output
    floatX *lnf;                   // (Nl, C)
    float *lnf_mean, *lnf_rstd;    // (Nl)
};

// One end of a link to a neighbouring stage: activations or gradients, sent or received. See llmc/pipeline.h.
struct LinkEnd {
    ncclComm_t comm;               // of two ranks, 0 sends to 1; NULL: no such link
    cudaStream_t stream;
    floatX *buffer[PIPELINE_BUFFERS];      // (N * C / t): with tensor ranks each carries its part of the message
    cudaEvent_t moved[PIPELINE_BUFFERS];   // the message in the buffer has arrived, or has been sent
    cudaEvent_t ready[PIPELINE_BUFFERS];   // the buffer has been emptied, or filled, by the compute stream
    size_t count;                  // messages so far; number k uses buffer k % PIPELINE_BUFFERS
};

struct GPT : Trainer {
    ncclComm_t tensor;             // the t ranks that share each layer
    ncclComm_t embedding;          // first and last stage, which both hold wte; NULL between them and with one stage
    ncclComm_t data;               // the d ranks that hold the same part of the model
    cudaStream_t data_stream;
    cudaEvent_t bucket_done, reduced_all;  // gradients of a bucket are complete; all buckets are reduced
    cudaEvent_t *gathered_bucket;  // [buckets] its weights are up to date on every data rank
    LinkEnd receive[2], send[2];   // of activations and of gradients: indexed by StepKind
    PipelinePlan plan;             // this stage's chunks of layers, and its steps with their slots
    bool sp;                       // sequence parallelism, and t > 1
    cudaStream_t comm;             // of the collectives that overlap compute
    cudaEvent_t computed, reduced_ready, gathered_ready;

    Acts *slots;                   // [plan.slots] micro-batches in flight: the schedule says how many
    floatX *logits;                // (N, Vl), then their gradient
    floatX *last_logits;           // (Vp) of one token, gathered to sample from
    float *row_max, *row_sums;     // (N) and (2, N): maximum, sum of exponentials and target logit of each token
    float *row_max_local;          // (N) before the reduction
    floatX *proj;                  // (N, C) output of a projection before its bias and the residual are added
    floatX *reduced;               // (Nl, C) the same summed over the tensor ranks; proj itself without sp
    floatX *gathered, *dgathered;  // (N, C) with sp: what f and g's backward gather
    floatX *dresidual;             // (Nl, C) gradient of the residual stream
    floatX *dnorm;                 // (N, C) gradient of a layernorm's output, and (N, A) of atty
    floatX *dreduced;              // (Nl, C) the same summed over the tensor ranks; dnorm itself without sp
    floatX *dqkv;                  // (N, 3A)
    floatX *dfch;                  // (N, F)
    float *dattention;             // (B, NH, T) scratch
    float *reduce_scratch;         // for the two-stage column sums
};

// Rows of the residual stream that this rank holds of N.
static size_t local_rows(const GPT *m, size_t N) { return m->sp ? N / m->grid.t : N; }

// Gives what one micro-batch keeps its place. Recomputation shares one buffer among the layers.
static void layout_acts(GPT *m, Arena *arena, Acts *acts) {
    size_t N = m->B * m->T, Nl = local_rows(m, N), C = m->config.C, A = m->A, F = m->F, L = m->plan.most_layers;
    host_array(acts->layers, L), host_array(acts->residual, L + 1), host_array(acts->grads, L);
    for (size_t l = 0; l < L; l++) {
        LayerActs *a = &acts->layers[l], *shared = &m->slots[0].layers[0];
        LayerGrads *g = &acts->grads[l];
        take(arena, acts->residual[l], Nl * C);
        g->dfch = m->dfch, g->dqkv = m->dqkv;
        if (m->plan.split) take(arena, g->dout, Nl * C), take(arena, g->dresidual2, Nl * C),
                           take(arena, g->dfch, N * F), take(arena, g->dqkv, N * 3 * A);
        if (a != shared && m->opt.recompute == RECOMPUTE_LAYER) { *a = *shared; continue; }
        take(arena, a->ln1, Nl * C), take(arena, a->ln1_mean, Nl), take(arena, a->ln1_rstd, Nl);
        take(arena, a->qkv, N * 3 * A), take(arena, a->lse, N * m->NH), take(arena, a->atty, N * A);
        take(arena, a->residual2, Nl * C);
        take(arena, a->ln2, Nl * C), take(arena, a->ln2_mean, Nl), take(arena, a->ln2_rstd, Nl);
        take(arena, a->fch, N * F);
        if (a != shared && m->opt.recompute == RECOMPUTE_GELU) a->fch_gelu = shared->fch_gelu;
        else take(arena, a->fch_gelu, N * F);
    }
    take(arena, acts->residual[L], Nl * C);
    if (!m->table.shard.head) return;
    take(arena, acts->lnf, Nl * C), take(arena, acts->lnf_mean, Nl), take(arena, acts->lnf_rstd, Nl);
}

// Gives every buffer its place.
static void layout(GPT *m) {
    size_t N = m->B * m->T, Nl = local_rows(m, N), C = m->config.C, A = m->A, F = m->F;
    Arena *arena = trainer_layout(m);
    for (int i = 0; i < 2 * PIPELINE_BUFFERS && m->grid.p > 1; i++) {
        take(arena, m->receive[i % 2].buffer[i / 2], N * C / m->grid.t);
        take(arena, m->send[i % 2].buffer[i / 2], N * C / m->grid.t);
    }
    if (m->table.shard.head) take(arena, m->logits, N * m->Vl);
    take(arena, m->last_logits, m->config.Vp);
    take(arena, m->row_max, N), take(arena, m->row_sums, 2 * N), take(arena, m->row_max_local, N);
    take(arena, m->proj, N * C), take(arena, m->dresidual, Nl * C), take(arena, m->dnorm, N * C);
    m->reduced = m->proj, m->dreduced = m->dnorm;
    if (m->sp) {
        take(arena, m->reduced, Nl * C), take(arena, m->dreduced, Nl * C);
        take(arena, m->gathered, N * C), take(arena, m->dgathered, N * C);
    }
    take(arena, m->dqkv, N * 3 * A), take(arena, m->dfch, N * F), take(arena, m->dattention, N * m->NH);
    take(arena, m->reduce_scratch, reduce_scratch_floats(N, C, F));
    host_array(m->slots, m->plan.slots);
    for (size_t i = 0; i < m->plan.slots; i++) layout_acts(m, arena, &m->slots[i]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Operators f and g

// Lets the compute stream wait for another stream's event. The span shows how long: communication that is not hidden.
static void wait_for(GPT *m, cudaEvent_t event, const char *what) {
    Span span(m, m->stream, TRACK_COMPUTE, what);
    CUDA_CHECK(cudaStreamWaitEvent(m->stream, event, 0));
}

// Operator f of the paper: identity in forward, all-reduce in backward. Under sequence parallelism its forward gathers
// the rows of all ranks, (Nl, C) -> (N, C), and its backward sums and scatters them again.
static const floatX *f_forward(GPT *m, const floatX *x, size_t N, cudaStream_t stream) {
    if (!m->sp) return x;
    Span span(m, stream, stream == m->comm ? TRACK_TENSOR : TRACK_COMPUTE, "all-gather");
    NCCL_CHECK(ncclAllGather(x, m->gathered, local_rows(m, N) * m->config.C, NCCL_FLOATX, m->tensor, stream));
    return m->gathered;
}

// Starts the sum of dnorm (N, C) over the ranks into dreduced (Nl, C), on a stream of its own: the weight gradients
// that follow on the compute stream overlap it. f_backward_end makes the compute stream wait for it.
static void f_backward_begin(GPT *m) {
    if (m->grid.t == 1) return;
    size_t count = m->B * m->T * m->config.C, part = count / m->grid.t;
    CUDA_CHECK(cudaEventRecord(m->computed, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->comm, m->computed, 0));
    Span span(m, m->comm, TRACK_TENSOR, m->sp ? "reduce-scatter" : "all-reduce");
    if (m->sp) NCCL_CHECK(ncclReduceScatter(m->dnorm, m->dreduced, part, NCCL_FLOATX, ncclSum, m->tensor, m->comm));
    else NCCL_CHECK(ncclAllReduce(m->dnorm, m->dnorm, count, NCCL_FLOATX, ncclSum, m->tensor, m->comm));
    CUDA_CHECK(cudaEventRecord(m->reduced_ready, m->comm));
}

static void f_backward_end(GPT *m) {
    if (m->grid.t > 1) wait_for(m, m->reduced_ready, "wait tensor");
}

// Under sequence parallelism backward needs f's output again, which was not kept: gathers it beside the compute stream.
static const floatX *f_again_begin(GPT *m, const floatX *x) {
    if (!m->sp) return x;
    CUDA_CHECK(cudaEventRecord(m->computed, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->comm, m->computed, 0));
    f_forward(m, x, m->B * m->T, m->comm);
    CUDA_CHECK(cudaEventRecord(m->gathered_ready, m->comm));
    return m->gathered;
}

static void f_again_end(GPT *m) {
    if (m->sp) wait_for(m, m->gathered_ready, "wait tensor");
}

// Operator g: all-reduce in forward, identity in backward. Under sequence parallelism the reduce-scatter
// (N, C) -> (Nl, C), and the all-gather.
static void g_forward(GPT *m, floatX *out, const floatX *partial, size_t N) {
    if (m->grid.t == 1) return;
    size_t count = local_rows(m, N) * m->config.C;
    Span span(m, m->stream, TRACK_COMPUTE, m->sp ? "reduce-scatter" : "all-reduce");
    if (m->sp) NCCL_CHECK(ncclReduceScatter(partial, out, count, NCCL_FLOATX, ncclSum, m->tensor, m->stream));
    else NCCL_CHECK(ncclAllReduce(partial, out, count, NCCL_FLOATX, ncclSum, m->tensor, m->stream));
}

static const floatX *g_backward(GPT *m, const floatX *dresidual) {
    if (!m->sp) return dresidual;
    size_t count = local_rows(m, m->B * m->T) * m->config.C;
    Span span(m, m->stream, TRACK_COMPUTE, "all-gather");
    NCCL_CHECK(ncclAllGather(dresidual, m->dgathered, count, NCCL_FLOATX, m->tensor, m->stream));
    return m->dgathered;
}

// Under sequence parallelism a rank's layernorm gradients cover its own tokens: their sum over the ranks is the
// gradient. Sums those that stand in elements [lo, hi) of the flat buffer.
static void reduce_layernorms(GPT *m, size_t lo, size_t hi) {
    if (!m->sp) return;
    NCCL_CHECK(ncclGroupStart());
    for (size_t i = 0; i < m->table.count; i++) {
        const Tensor *x = &m->table.tensors[i];
        if (!is_layernorm(x->kind) || x->offset < lo || x->offset >= hi) continue;
        float *dx = m->state.grads + x->offset;
        NCCL_CHECK(ncclAllReduce(dx, dx, x->size, ncclFloat, ncclSum, m->tensor, m->stream));
    }
    NCCL_CHECK(ncclGroupEnd());
}

// ---------------------------------------------------------------------------------------------------------------------
// Buckets: gradients are summed and weights are gathered over the data ranks

// Buckets of the flat buffer: 0 the embeddings, 1 + l layer l, the last ln_f.
static size_t bucket_count(const GPT *m) { return m->table.shard.n_layers + 2; }

// Sums a bucket of gradients over the data ranks, on a stream of its own beside the backward pass; each rank ends with
// its part, and without ZeRO all of them with all parts.
static void reduce_bucket(GPT *m, size_t bucket) {
    size_t lo = m->table.buckets[bucket], hi = m->table.buckets[bucket + 1], part = (hi - lo) / m->grid.d;
    float *grads = m->state.grads + lo, *mine = grads + m->grid.d_rank * part;
    reduce_layernorms(m, lo, hi);
    if (m->grid.d == 1 || part == 0) return;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->data_stream, m->bucket_done, 0));
    Span span(m, m->data_stream, TRACK_DATA, "reduce-scatter");
    NCCL_CHECK(ncclReduceScatter(grads, mine, part, ncclFloat, ncclSum, m->data, m->data_stream));
    if (!m->opt.zero) NCCL_CHECK(ncclAllGather(mine, grads, part, ncclFloat, m->data, m->data_stream));
}

// Gathers the updated weights of all buckets, in the order in which forward needs them.
static void gather_weights(GPT *m) {
    if (m->grid.d == 1 || !m->opt.zero) return;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->data_stream, m->bucket_done, 0));
    for (size_t b = 0; b < bucket_count(m); b++) {
        size_t lo = m->table.buckets[b], part = (m->table.buckets[b + 1] - lo) / m->grid.d;
        if (part == 0) continue;
        floatX *params = m->state.params + lo, *mine = params + m->grid.d_rank * part;
        Span span(m, m->data_stream, TRACK_DATA, "all-gather");
        NCCL_CHECK(ncclAllGather(mine, params, part, NCCL_FLOATX, m->data, m->data_stream));
        CUDA_CHECK(cudaEventRecord(m->gathered_bucket[b], m->data_stream));
        if (!m->opt.overlap) CUDA_CHECK(cudaStreamWaitEvent(m->stream, m->gathered_bucket[b], 0));
    }
}

// Before weights of a bucket are read: waits on the device until they have been gathered.
static void use_bucket(GPT *m, size_t bucket) {
    if (m->grid.d > 1 && m->opt.zero) wait_for(m, m->gathered_bucket[bucket], "wait data");
}

// ---------------------------------------------------------------------------------------------------------------------
// Links between pipeline stages

// Enqueues the receipt of x (Nl, C) of N tokens from the neighbour: activations or gradients. Of t tensor ranks each
// gets 1/t from its counterpart and all gather (the scatter/gather optimisation); under sequence parallelism x is 1/t.
static void link_receive(GPT *m, StepKind kind, floatX *x, size_t N, int micro, int chunk) {
    LinkEnd *end = &m->receive[kind];
    size_t b = end->count++ % PIPELINE_BUFFERS, count = N * m->config.C / m->grid.t;
    CUDA_CHECK(cudaStreamWaitEvent(end->stream, end->ready[b], 0));
    Span span(m, end->stream, TRACK_RECEIVE + 2 * kind, "recv", micro, chunk);
    NCCL_CHECK(ncclRecv(end->buffer[b], count, NCCL_FLOATX, 0, end->comm, end->stream));
    CUDA_CHECK(cudaEventRecord(end->moved[b], end->stream));
    wait_for(m, end->moved[b], "wait pipeline");
    if (m->sp || m->grid.t == 1) trainer_copy(m, x, end->buffer[b], count);
    else NCCL_CHECK(ncclAllGather(end->buffer[b], x, count, NCCL_FLOATX, m->tensor, m->stream));
    CUDA_CHECK(cudaEventRecord(end->ready[b], m->stream));
}

// Enqueues the sending of x to the neighbour; x may be overwritten by what is enqueued later.
static void link_send(GPT *m, StepKind kind, const floatX *x, size_t N, int micro, int chunk) {
    LinkEnd *end = &m->send[kind];
    size_t b = end->count++ % PIPELINE_BUFFERS, count = N * m->config.C / m->grid.t;
    const floatX *mine = m->sp ? x : x + m->grid.t_rank * count;
    wait_for(m, end->moved[b], "wait pipeline");
    trainer_copy(m, end->buffer[b], mine, count);
    CUDA_CHECK(cudaEventRecord(end->ready[b], m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(end->stream, end->ready[b], 0));
    Span span(m, end->stream, TRACK_SEND + 2 * kind, "send", micro, chunk);
    NCCL_CHECK(ncclSend(end->buffer[b], count, NCCL_FLOATX, 1, end->comm, end->stream));
    CUDA_CHECK(cudaEventRecord(end->moved[b], end->stream));
}

// The chunk that starts from tokens, and the one that ends in the loss.
static bool is_first(const GPT *m, size_t chunk) { return m->table.shard.embedding && chunk == 0; }
static bool is_last(const GPT *m, size_t chunk) { return m->table.shard.head && chunk == m->plan.chunks - 1; }

// ---------------------------------------------------------------------------------------------------------------------
// Forward and backward

// One layer: x (Nl, C) -> out (Nl, C).
static void layer_forward(GPT *m, size_t l, LayerActs *a, floatX *out, const floatX *x, size_t B, size_t T) {
    size_t N = B * T, Nl = local_rows(m, N), C = m->config.C, A = m->A, F = m->F;
    floatX **w = m->w[l];
    cudaStream_t s = m->stream;
    layernorm_forward(a->ln1, a->ln1_mean, a->ln1_rstd, x, w[LN1W], w[LN1B], Nl, C, s);
    const floatX *ln1 = f_forward(m, a->ln1, N, s);
    matmul_forward(&m->matmul, a->qkv, ln1, w[QKVW], w[QKVB], N, C, 3 * A);
    attention_forward(a->atty, a->lse, a->qkv, B, T, A, m->NH, s, drop(m, l));
    matmul_forward(&m->matmul, m->proj, a->atty, w[PROJW], NULL, N, A, C);
    g_forward(m, m->reduced, m->proj, N);
    const floatX *b = dropout_forward(m, RANDOM_DROPOUT_ATTENTION, l, m->reduced, w[PROJB], Nl);
    layernorm_residual_forward(a->residual2, a->ln2, a->ln2_mean, a->ln2_rstd, x, m->reduced, b, w[LN2W],
                               w[LN2B], Nl, C, s);
    const floatX *ln2 = f_forward(m, a->ln2, N, s);
    matmul_forward(&m->matmul, a->fch, ln2, w[FCW], w[FCB], N, C, F);
    gelu_forward(a->fch_gelu, a->fch, N * F, s);
    if (!out) return;  // recomputation: backward needs nothing of what follows
    matmul_forward(&m->matmul, m->proj, a->fch_gelu, w[FCPROJW], NULL, N, F, C);
    g_forward(m, m->reduced, m->proj, N);
    b = dropout_forward(m, RANDOM_DROPOUT_MLP, l, m->reduced, w[FCPROJB], Nl);
    residual_forward(out, a->residual2, m->reduced, b, Nl, C, s);
}

// dresidual (Nl, C) -> (N, C) where a matrix product needs it. The input half keeps it for the weight half.
static const floatX *output_gradient(GPT *m, RandomPurpose place, size_t l, floatX *kept, int half) {
    size_t Nl = local_rows(m, m->B * m->T);
    if (half == INPUT_HALF) trainer_copy(m, kept, m->dresidual, Nl * m->config.C);
    return g_backward(m, dropout_backward(m, place, l, half == WEIGHT_HALF ? kept : m->dresidual, m->proj, Nl));
}

// One layer: dresidual (Nl, C) is the gradient of its output and becomes that of its input x. Weight gradients are
// written by the first micro-batch and added to by the others (add). half: what of this is done.
static void layer_backward(GPT *m, size_t l, LayerActs *a, LayerGrads *g, const floatX *x, bool add, int half) {
    size_t B = m->B, T = m->T, N = B * T, Nl = local_rows(m, N), C = m->config.C, A = m->A, F = m->F;
    floatX **w = m->w[l], *dresidual = m->dresidual;
    float **dw = m->dw[l], *scratch = m->reduce_scratch;
    cudaStream_t s = m->stream;
    bool input = half & INPUT_HALF, weights = half & WEIGHT_HALF;
    if (m->opt.recompute == RECOMPUTE_LAYER) layer_forward(m, l, a, NULL, x, B, T);
    if (m->opt.recompute == RECOMPUTE_GELU && weights) gelu_forward(a->fch_gelu, a->fch, N * F, s);
    // the MLP
    const floatX *dout = output_gradient(m, RANDOM_DROPOUT_MLP, l, g->dout, half);
    const floatX *ln2 = weights ? f_again_begin(m, a->ln2) : NULL;
    if (input) matmul_backward_input(&m->matmul, g->dfch, dout, w[FCPROJW], N, F, C);
    if (weights) matmul_backward_weight(&m->matmul, dw[FCPROJW], a->fch_gelu, dout, N, F, C, add);
    if (bias_apart(m) && weights) bias_backward(dw[FCPROJB], dout, scratch, N, C, add, s);
    if (input) gelu_bias_backward(g->dfch, dw[FCB], scratch, g->dfch, a->fch, N, F, add, s);
    if (input) matmul_backward_input(&m->matmul, m->dnorm, g->dfch, w[FCW], N, C, F);
    if (input) f_backward_begin(m);
    if (weights) f_again_end(m);
    if (weights) matmul_backward_weight(&m->matmul, dw[FCW], ln2, g->dfch, N, C, F, add);
    if (input) f_backward_end(m);
    if (input) layernorm_bias_backward(dresidual, dw[LN2W], dw[LN2B], bias_with(m, dw[FCPROJB]), scratch, dresidual,
                                       m->dreduced, a->residual2, w[LN2W], a->ln2_mean, a->ln2_rstd, Nl, C, add, s);
    // the attention
    dout = output_gradient(m, RANDOM_DROPOUT_ATTENTION, l, g->dresidual2, half);
    const floatX *ln1 = weights ? f_again_begin(m, a->ln1) : NULL;
    if (input) matmul_backward_input(&m->matmul, m->dnorm, dout, w[PROJW], N, A, C);
    if (weights) matmul_backward_weight(&m->matmul, dw[PROJW], a->atty, dout, N, A, C, add);
    if (bias_apart(m) && weights) bias_backward(dw[PROJB], dout, scratch, N, C, add, s);
    if (input) attention_backward(g->dqkv, m->dattention, m->dnorm, a->atty, a->lse, a->qkv, B, T, A, m->NH, s,
                                  drop(m, l));
    if (input) matmul_backward_input(&m->matmul, m->dnorm, g->dqkv, w[QKVW], N, C, 3 * A);
    if (input) f_backward_begin(m);
    if (weights) f_again_end(m);
    if (weights) matmul_backward_weight(&m->matmul, dw[QKVW], ln1, g->dqkv, N, C, 3 * A, add);
    if (weights) bias_backward(dw[QKVB], g->dqkv, scratch, N, 3 * A, add, s);
    if (input) f_backward_end(m);
    if (input) layernorm_bias_backward(dresidual, dw[LN1W], dw[LN1B], bias_with(m, dw[PROJB]), scratch,
                                       dresidual, m->dreduced, x, w[LN1W], a->ln1_mean, a->ln1_rstd, Nl, C, add, s);
}

// One chunk: tokens (B, T) or residual[0] -> lnf (Nl, C) or residual[L]. Tensor rank 0 adds the positions.
static void forward(GPT *m, Acts *acts, const int *inputs, size_t B, size_t T, int micro, int chunk) {
    size_t N = B * T, Nl = local_rows(m, N), C = m->config.C, L = m->plan.count[chunk], first = m->plan.first[chunk];
    floatX **w = m->w[0];
    Span span(m, m->stream, TRACK_COMPUTE, "forward", micro, chunk);
    floatX *encoded = m->sp ? m->proj : acts->residual[0];
    if (is_first(m, chunk)) {
        use_bucket(m, 0);
        encoder_forward(encoded, inputs, w[WTE], m->grid.t_rank == 0 ? w[WPE] : NULL, B, T, C, m->V0, m->Vl, m->stream);
        g_forward(m, acts->residual[0], encoded, N);
        dropout_forward(m, RANDOM_DROPOUT_EMBEDDING, 0, acts->residual[0], NULL, Nl);
    }
    for (size_t l = 0; l < L; l++) {
        use_bucket(m, 1 + first + l);
        layer_forward(m, first + l, &acts->layers[l], acts->residual[l + 1], acts->residual[l], B, T);
    }
    if (!is_last(m, chunk)) return;
    use_bucket(m, 0);  // the head is wte
    use_bucket(m, bucket_count(m) - 1);
    layernorm_forward(acts->lnf, acts->lnf_mean, acts->lnf_rstd, acts->residual[L], w[LNFW], w[LNFB], Nl, C, m->stream);
}

// lnf (Nl, C) -> the micro-batch's sum of losses; logits become the gradient of the step's mean loss if wanted. Every
// rank has the logits of its part of the vocabulary; only three numbers a token travel: maximum, sum, target logit.
static void loss(GPT *m, Acts *acts, const int *targets, int micro, bool want_gradient) {
    size_t N = m->B * m->T, C = m->config.C, V = m->config.V;
    Span span(m, m->stream, TRACK_COMPUTE, "loss", micro);
    float *sum = m->row_sums, *target = m->row_sums + N, *losses = m->losses + micro * 2 * N;
    head_forward(&m->matmul, m->logits, f_forward(m, acts->lnf, N, m->stream), m->w[0][WTE], N, C, m->Vl);
    classifier_stats(m->row_max_local, sum, target, m->logits, targets, N, V, m->Vl, m->V0, m->stream);
    NCCL_CHECK(ncclAllReduce(m->row_max_local, m->row_max, N, ncclFloat, ncclMax, m->tensor, m->stream));
    classifier_rescale(sum, m->row_max_local, m->row_max, N, m->stream);
    NCCL_CHECK(ncclAllReduce(m->row_sums, m->row_sums, 2 * N, ncclFloat, ncclSum, m->tensor, m->stream));
    classifier_gradient(losses, m->logits, m->row_max, sum, target, targets, m->dloss, N, V, m->Vl, m->V0,
                        want_gradient, m->stream);
    loss_sum(&m->loss_sums[micro], losses, N, m->stream);
}

// One chunk, after loss() or from its output's gradient in dresidual. Embeddings and layernorms are of the input half.
static void backward(GPT *m, Acts *acts, const int *inputs, int micro, int chunk, int half) {
    size_t B = m->B, T = m->T, N = B * T, Nl = local_rows(m, N), C = m->config.C;
    size_t L = m->plan.count[chunk], first = m->plan.first[chunk];
    floatX **w = m->w[0];
    float **dw = m->dw[0];
    bool add = micro > 0, reduce = m->opt.overlap && (size_t)micro == m->micros - 1;
    Span span(m, m->stream, TRACK_COMPUTE, half == WEIGHT_HALF ? "weight" : "backward", micro, chunk);
    if (is_last(m, chunk) && half != WEIGHT_HALF) {
        const floatX *lnf = f_again_begin(m, acts->lnf);
        head_backward_input(&m->matmul, m->dnorm, m->logits, w[WTE], N, C, m->Vl);
        f_backward_begin(m);
        f_again_end(m);
        head_backward_weight(&m->matmul, dw[WTE], lnf, m->logits, N, C, m->Vl, add);
        f_backward_end(m);
        layernorm_backward(m->dresidual, dw[LNFW], dw[LNFB], m->reduce_scratch, NULL, m->dreduced, acts->residual[L],
                           w[LNFW], acts->lnf_mean, acts->lnf_rstd, Nl, C, add, m->stream);
        if (reduce) reduce_bucket(m, bucket_count(m) - 1);
    }
    for (size_t l = L; l-- > 0;) {
        layer_backward(m, first + l, &acts->layers[l], &acts->grads[l], acts->residual[l], add, half);
        if (reduce && half != INPUT_HALF) reduce_bucket(m, 1 + first + l);
    }
    if (!is_first(m, chunk) || half == WEIGHT_HALF) return;
    dropout_backward(m, RANDOM_DROPOUT_EMBEDDING, 0, m->dresidual, m->dresidual, Nl);
    const floatX *dout = g_backward(m, m->dresidual);
    encoder_backward(dw[WTE], dw[WPE], dout, inputs, B, T, C, m->config.maxT, m->V0, m->Vl, add, m->stream);
}

// A forward or backward with what it receives and what it sends. The host only enqueues.
static void forward_step(GPT *m, Acts *acts, const int *inputs, size_t B, size_t T, int micro, int chunk) {
    if (!is_first(m, chunk)) link_receive(m, STEP_FORWARD, acts->residual[0], B * T, micro, chunk);
    if (micro < 0) trainer_synchronize(m);  // a sample: products of new shapes, see connect
    forward(m, acts, inputs, B, T, micro, chunk);
    if (!is_last(m, chunk)) link_send(m, STEP_FORWARD, acts->residual[m->plan.count[chunk]], B * T, micro, chunk);
}

static void backward_step(GPT *m, Acts *acts, const int *inputs, int micro, int chunk) {
    if (!is_last(m, chunk)) link_receive(m, STEP_BACKWARD, m->dresidual, m->B * m->T, micro, chunk);
    backward(m, acts, inputs, micro, chunk, m->plan.split ? INPUT_HALF : BOTH_HALVES);
    if (!is_first(m, chunk)) link_send(m, STEP_BACKWARD, m->dresidual, m->B * m->T, micro, chunk);
}

// This stage's list of steps: all of it to train, its forwards alone to validate.
static void run_batch(GPT *m, bool training) {
    for (size_t i = 0; i < m->plan.step_count; i++) {
        PipelineStep step = m->plan.steps[i];
        if ((size_t)step.micro >= m->micros) continue;  // the list is that of a full batch, --ramp begins with less
        Acts *acts = &m->slots[training ? m->plan.slot[i] : 0];
        size_t at = step.micro * m->B * m->T;
        dropout_at(m, step.micro);
        if (step.kind == STEP_FORWARD) forward_step(m, acts, m->inputs + at, m->B, m->T, step.micro, step.chunk);
        // The logits are made when their gradient is due: one buffer serves all micro-batches in flight.
        bool loss_now = is_last(m, step.chunk) && step.kind == (training ? STEP_BACKWARD : STEP_FORWARD);
        if (loss_now) loss(m, acts, m->targets + at, step.micro, training);
        if (step.kind == STEP_BACKWARD && training) backward_step(m, acts, m->inputs + at, step.micro, step.chunk);
        if (step.kind == STEP_WEIGHT && training) backward(m, acts, NULL, step.micro, step.chunk, WEIGHT_HALF);
    }
}

// First and last stage hold the tied embedding and saw its two uses: the sum is the gradient, and both need it. This
// comes before the data ranks reduce the bucket: after that only 1/d of it is valid on a rank, and the two stages'
// buckets 0 differ in length (wpe), so the slices that they own are not the same elements of wte.
static void reduce_embedding(GPT *m) {
    if (!m->embedding) return;
    size_t count = table_find(&m->table, WTE, 0)->size;
    NCCL_CHECK(ncclAllReduce(m->dw[0][WTE], m->dw[0][WTE], count, ncclFloat, ncclSum, m->embedding, m->stream));
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

// --debug-replicas: what several ranks hold must stay the same bits on all of them.
static void check_replicas(GPT *m) {
    Error err;
    CUDA_CHECK(cudaDeviceSynchronize());
    bool equal = replicas_check(&m->state, &m->table, REPLICAS_ALL, m->data, "data", m->stream, &err);
    equal = equal && replicas_check(&m->state, &m->table, REPLICAS_UNSPLIT, m->tensor, "tensor", m->stream, &err);
    equal = equal && (!m->embedding || replicas_check(&m->state, &m->table, REPLICAS_TIED, m->embedding, "embedding",
                                                      m->stream, &err));
    if (!equal) job_fail(&m->job, &err);
}

// Forward, backward and update over the next global batch.
static void train_step(GPT *m) {
    StepReport report = trainer_begin_step(m);
    if (m->embedding) zero_gradient(m, WTE);  // the head's gradient writes wte's, the encoder's adds to it
    run_batch(m, true);
    reduce_embedding(m);
    reduce_bucket(m, 0);
    for (size_t b = 1; b < bucket_count(m) && !m->opt.overlap; b++) reduce_bucket(m, b);
    CUDA_CHECK(cudaEventRecord(m->reduced_all, m->data_stream));
    if (m->grid.d > 1) wait_for(m, m->reduced_all, "wait data");
    trainer_norm(m, &report);
    trainer_adamw(m, &report);
    gather_weights(m);
    if (m->opt.debug_replicas) check_replicas(m);
    trainer_end_step(m, &report);
}

// Reports the loss over the first batches of the validation data, or over the rows of --eval.
static void validate(GPT *m) {
    Validation v = validation_begin(m);
    while (validation_goes_on(m, &v)) run_batch(m, false);
}

// The logits (Vp) behind the last of the T tokens in inputs.
static const floatX *next_logits(GPT *m, size_t T) {
    size_t padded = sample_padded(m, T);
    for (size_t c = 0; c < m->plan.chunks; c++) forward_step(m, &m->slots[0], m->inputs, 1, padded, -1, c);
    if (m->table.shard.head) {
        const floatX *lnf = f_forward(m, m->slots[0].lnf, padded, m->stream);
        head_forward(&m->matmul, m->logits, lnf + (T - 1) * m->config.C, m->w[0][WTE], 1, m->config.C, m->Vl);
        NCCL_CHECK(ncclAllGather(m->logits, m->last_logits, m->Vl, NCCL_FLOATX, m->tensor, m->stream));
    }
    int last = grid_rank_at(&m->grid, 0, 0, m->grid.p - 1);
    NCCL_CHECK(ncclBroadcast(m->last_logits, m->last_logits, m->config.Vp, NCCL_FLOATX, last, m->job.world, m->stream));
    return m->last_logits;
}

// Prints the prompt and its continuation, one forward pass for each new token.
static void sample(GPT *m) {
    Sample s = sample_begin(m);
    while (sample_goes_on(m, &s)) sample_append(m, &s, next_logits(m, s.T));
}

// This rank's part of its stage's layers. A tensor that ranks hold alike counts once in the gradient norm.
static void shard(GPT *m) {
    Error err;
    size_t p = m->grid.p, stage = m->grid.p_rank;
    PipelineTimes times = zero_bubble_times(m->config.C, m->T);
    PipelineLists lists;
    bool ok = zero_bubble_lists(&lists, (Schedule)m->opt.schedule, m->opt.schedule_file, p, m->micros, m->opt.chunks,
                                &times, m->opt.max_in_flight, &err);
    job_agree(&m->job, ok, &err);
    m->plan = pipeline_plan(&lists, m->config.L, stage);
    pipeline_lists_free(&lists);
    Shard part = {m->grid.t, m->grid.t_rank, stage == 0, stage == p - 1, m->plan.layer_count, m->plan.layers,
                  TENSOR_ALIGN * m->grid.d};
    m->table = table_make(&m->config, &part);
    m->sp = m->opt.sequence_parallel && m->grid.t > 1;
    for (size_t i = 0; i < m->table.count; i++) {
        Tensor *x = &m->table.tensors[i];
        x->counted = (x->split != SPLIT_NONE || m->grid.t_rank == 0) && (x->kind != WTE || stage == 0);
    }
}

// The communicators, with a stream of its own for each end of a link. Then all that training uses is used once, while
// no message is in flight (llmc/trainer/connect.cuh): kernels write gradients, then add to them and drop out.
static void connect(GPT *m) {
    ncclComm_t links[4];
    job_connect(&m->job);
    m->tensor = job_split_grid(&m->job, &m->grid, 't', "tensor", true);
    job_connect_links(&m->job, &m->grid, m->plan.chunks, links, m->proj, m->stream);
    for (int i = 0; i < 4; i++) {
        LinkEnd *end = i < 2 ? &m->receive[i] : &m->send[i - 2];
        end->comm = links[i], end->stream = stream_create(m, true);
        for (int b = 0; b < PIPELINE_BUFFERS; b++) event_create(&end->moved[b]), event_create(&end->ready[b]);
    }
    if (m->grid.p > 1) m->embedding = job_split_grid(&m->job, &m->grid, 'e', "embedding");
    m->data = job_split_grid(&m->job, &m->grid, 'd', "data");
    m->data_stream = stream_create(m, true);
    event_create(&m->bucket_done), event_create(&m->reduced_all);
    host_array(m->gathered_bucket, bucket_count(m));
    for (size_t b = 0; b < bucket_count(m); b++) event_create(&m->gathered_bucket[b]);
    m->comm = stream_create(m, true);
    event_create(&m->computed), event_create(&m->reduced_ready), event_create(&m->gathered_ready);
    trainer_warm_up(m);
    for (int i = 0, v = (int)m->plan.chunks; trainer_warms_up(m, i, v); i++) {
        forward(m, m->slots, m->inputs, m->B, m->T, i / v, i % v);
        if (is_last(m, i % v)) loss(m, m->slots, m->targets, 0, true);
        backward(m, m->slots, m->inputs, i / v, i % v, BOTH_HALVES);
    }
}

int main(int argc, char **argv) {
    static GPT gpt, *m = &gpt;
    trainer_open(m, argc, argv, OPTIONS_TENSOR | OPTIONS_PIPELINE | OPTIONS_DATA);  // bad input ends here
    shard(m);
    layout(m);                       // counts bytes
    trainer_allocate(m);
    layout(m);                       // sets pointers
    connect(m);
    trainer_start(m);

    for (;;) {  // what is due after the steps so far, then one more
        if (validation_due(m)) validate(m);
        if (save_due(m)) trainer_save(m);
        if (sample_due(m)) sample(m);
        if (is_last_step(m)) break;
        train_step(m);
    }
    return trainer_close(m);
}
