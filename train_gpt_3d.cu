// train_gpt_3d.cu: train_gpt_pp.cu plus data parallelism with a sharded optimizer (ZeRO stage 1, Rajbhandari et al.
// 2020): the full grid of t x d x p ranks. The last of four trainers.
//
// The d replicas share the global batch. A bucket of gradients (wte, wpe, each layer, ln_f) is summed over them
// by a reduce-scatter. ZeRO-1: each data rank then owns 1/d of every bucket, whatever tensors that cuts, updates it,
// and the weights are gathered again while the next forward runs.
//
// The layers are dealt to p stages in v chunks each: global chunk c*p + s is chunk c of stage s. A stage runs the list
// of steps that llmc/pipeline.h gives it; activations go up and gradients down over links.
//
// Each layer is shared by t ranks. QKV and FC are split by columns, the two projections and the vocabulary by rows.
// Operators f and g stand where the paper draws them. Under sequence parallelism layernorms and residuals are cut by
// rows: Nl = N/t.
//
// Letters: B micro-batch (sequences), T sequence length, N = B*T tokens, C channels, L layers, NH heads, V vocabulary,
// Vp the same padded to 128. A rank has Nl rows of the residual stream, A channels of heads, F hidden units, Vl of Vp.
// A shape stands behind every pointer. Weights are [in, out]: w[QKVW] is one of a layer, dw[QKVW] its gradient
// (llmc/model.h). A rank of t has A = C/t, F = 4C/t, Vl = Vp/t.

// Trainer: everything but the mathematics: options, memory, data, optimizer, checkpoints, log, timeline
#include "llmc/trainer/ranks.cuh"  // with trainer.cuh
#include "llmc/kernels/attention.cuh"
#include "llmc/kernels/classifier.cuh"
#include "llmc/kernels/encoder.cuh"
#include "llmc/kernels/gelu.cuh"
#include "llmc/kernels/layernorm.cuh"
#include "llmc/kernels/matmul.cuh"
#include "llmc/pipeline.h"

// ---------------------------------------------------------------------------------------------------------------------
// The model and its memory

// Activations of one layer: its forward pass keeps them for its backward pass.
struct LayerActs {
    Layernorm ln1;                 // (Nl, C), with mean and rstd (Nl)
    floatX *qkv;                   // (N, 3A)
    float *lse;                    // (B, NH, T) of attention: log-sum-exp of the scores
    floatX *atty;                  // (N, A)
    floatX *residual2;             // (Nl, C) residual stream between the two halves
    Layernorm ln2;                 // (Nl, C)
    floatX *fch, *fch_gelu;        // (N, F) before and after GELU
};

// Activations of one micro-batch, kept from its forward to its backward pass.
struct Acts {
    LayerActs *layers;             // [L]
    floatX **residual;             // [L + 1] of (Nl, C): input of layer l; the last is the input of ln_f
    Layernorm lnf;                 // (Nl, C)
};

// One end of a link: a link carries activations up or gradients down between two stages. See llmc/pipeline.h.
struct LinkEnd {
    ncclComm_t comm;               // of two ranks, 0 sends to 1; NULL: no such link
    cudaStream_t stream;
    floatX *buffer[PIPELINE_BUFFERS];      // (N * C / t): with tensor ranks each carries its part of the message
    cudaEvent_t moved[PIPELINE_BUFFERS];   // the message in the buffer has arrived, or has been sent
    cudaEvent_t ready[PIPELINE_BUFFERS];   // the compute stream has emptied the buffer, or has filled it
    size_t count;                  // messages so far; number k uses buffer k % PIPELINE_BUFFERS
};

struct GPT : Trainer {
    ncclComm_t tensor;             // the t ranks that share each layer
    ncclComm_t embedding;          // first and last stage, which both hold wte; NULL between them and with one stage
    LinkEnd receive[2], send[2];   // of activations and of gradients: indexed by StepKind
    PipelinePlan plan;             // this stage's chunks of layers, and its steps with their slots
    ncclComm_t data;               // the d ranks that hold the same part of the model
    cudaStream_t data_stream;
    cudaEvent_t bucket_done, reduced_all;  // gradients of a bucket are complete; all buckets are reduced
    cudaEvent_t *gathered_bucket;  // [buckets] its weights are up to date on every data rank

    cudaStream_t comm;             // of the collectives that overlap compute
    cudaEvent_t computed, reduced_ready, gathered_ready;

    Acts *slots;                   // [plan.slots] micro-batches in flight: the schedule says how many
    floatX *logits;                // (N, Vl), then their gradient
    float *row_max, *row_sums;     // (N) and (2, N): maximum, sum of exponentials and target logit of each token
    float *row_max_local;          // (N) of this rank's part of the vocabulary
    floatX *last_logits;           // (Vp) of one token, gathered to sample from
    floatX *proj;                  // (N, C) output of a projection; in backward the masked gradient with dropout
    floatX *reduced;               // (Nl, C) the same, summed over the tensor ranks: proj itself with Nl = N
    floatX *dresidual;             // (Nl, C) gradient of the residual stream
    floatX *dnorm;                 // (N, C) gradient of a layernorm's output, and (N, A) of atty
    floatX *dreduced;              // (Nl, C) the same, summed over the tensor ranks: dnorm itself with Nl = N
    floatX *gathered, *dgathered;  // (N, C) under sequence parallelism: outputs of f, and of g's backward
    floatX *dqkv;                  // (N, 3A)
    floatX *dfch;                  // (N, F)
    float *dattention;             // (B, NH, T) scratch
    float *reduce_scratch;         // for the two-stage column sums
};

// Makes this data rank the owner of 1/d of every bucket: of the reduced gradients, and with ZeRO of the optimizer.
static void own_buckets(GPT *m, State *state) {
    for (size_t b = 0; b < bucket_count(m); b++) {
        size_t lo = m->table.buckets[b], part = (m->table.buckets[b + 1] - lo) / m->grid.d;
        state_own(state, lo + m->grid.d_rank * part, part);
    }
}

// Takes this rank's part of every layer and of the vocabulary.
static void shard(GPT *m) {
    Error err;
    PipelineLists lists;
    size_t t = m->grid.t;
    job_agree(&m->job, pipeline_lists(&lists, (Schedule)m->opt.schedule, m->opt.schedule_file, m->grid.p, m->micros,
                                      m->opt.chunks, &err), &err);
    m->plan = pipeline_plan(&lists, m->config.L, m->opt.layers_per_stage, m->grid.p_rank);
    trainer_sizes(m, t), m->V0 = m->grid.t_rank * m->Vl;
    if (m->opt.sequence_parallel) m->sp = t;
    Shard part = shard_whole(&m->config);
    part.t = t, part.t_rank = m->grid.t_rank;
    part.embedding = m->grid.p_rank == 0, part.head = m->grid.p_rank == m->grid.p - 1;
    part.n_layers = m->plan.layer_count, part.layers = m->plan.layers;
    part.bucket_align = TENSOR_ALIGN * m->grid.d;
    trainer_shard(m, part);
    own_buckets(m, &m->part);
    if (m->opt.zero) own_buckets(m, &m->state);
}

// Takes memory for the activations of one micro-batch. With recomputation the layers share those of the first one.
static void layout_acts(GPT *m, Arena *arena, Acts *acts) {
    size_t N = m->B * m->T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F, L = m->plan.most_layers;
    host_array(acts->layers, L), host_array(acts->residual, L + 1);
    for (size_t l = 0; l <= L; l++) take(arena, acts->residual[l], Nl * C);
    for (size_t l = 0; l < L; l++) {
        LayerActs *a = &acts->layers[l], *first = &m->slots[0].layers[0];
        int again = a == first ? RECOMPUTE_NONE : m->opt.recompute;  // what backward computes again
        *a = *first;
        if (again < RECOMPUTE_LAYER) take(arena, a->lse, N * m->NH), take(arena, a->atty, N * A);
        if (again < RECOMPUTE_GELU) take(arena, a->fch_gelu, N * F);
        if (again >= RECOMPUTE_REST) continue;
        take_layernorm(arena, &a->ln1, Nl, C), take_layernorm(arena, &a->ln2, Nl, C);
        take(arena, a->qkv, N * 3 * A), take(arena, a->residual2, Nl * C), take(arena, a->fch, N * F);
    }
    if (m->table.shard.head) take_layernorm(arena, &acts->lnf, Nl, C);
}

// Takes memory for every buffer: called once to count bytes, and once to set pointers.
static void layout(GPT *m) {
    size_t N = m->B * m->T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F;
    Arena *arena = trainer_layout(m);
    if (m->table.shard.head) take(arena, m->logits, N * m->Vl);
    take(arena, m->row_max, N), take(arena, m->row_sums, 2 * N);
    take(arena, m->proj, N * C), take(arena, m->dresidual, Nl * C), take(arena, m->dnorm, N * C);
    m->reduced = m->proj, m->dreduced = m->dnorm;
    take(arena, m->row_max_local, N), take(arena, m->last_logits, m->config.Vp);
    if (m->sp > 1) {
        take(arena, m->reduced, Nl * C), take(arena, m->dreduced, Nl * C);
        take(arena, m->gathered, N * C), take(arena, m->dgathered, N * C);
    }
    take(arena, m->dqkv, N * 3 * A), take(arena, m->dfch, N * F), take(arena, m->dattention, N * m->NH);
    take(arena, m->reduce_scratch, reduce_scratch_floats(N, C, F));
    size_t message = m->grid.p > 1 ? N * C / m->grid.t : 0;
    for (int b = 0; b < PIPELINE_BUFFERS; b++) {
        for (LinkEnd *ends : {m->receive, m->send})
            take(arena, ends[STEP_FORWARD].buffer[b], message), take(arena, ends[STEP_BACKWARD].buffer[b], message);
    }
    host_array(m->slots, m->plan.slots);
    for (size_t i = 0; i < m->plan.slots; i++) layout_acts(m, arena, &m->slots[i]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Operators f and g

// Lets the compute stream wait for an event, if it was ever recorded. The span shows exposed communication.
static void wait_for(GPT *m, cudaEvent_t event, const char *name) {
    Span span(m, m->stream, name);
    CUDA_CHECK(cudaStreamWaitEvent(m->stream, event, 0));
}

// Sums partial (N, C) over the tensor ranks into out (Nl, C): all of it, or under sequence parallelism a rank's rows.
static void tensor_sum(GPT *m, floatX *out, const floatX *partial, size_t N, cudaStream_t s) {
    size_t count = N / m->sp * m->config.C;
    Span span(m, s, m->sp > 1 ? "reduce-scatter" : "all-reduce");
    if (m->sp > 1) NCCL_CHECK(ncclReduceScatter(partial, out, count, NCCL_FLOATX, ncclSum, m->tensor, s));
    else NCCL_CHECK(ncclAllReduce(partial, out, count, NCCL_FLOATX, ncclSum, m->tensor, s));
}

// Under sequence parallelism gathers the rows of all tensor ranks, x (Nl, C) -> out (N, C), and returns out; else x.
static const floatX *tensor_gather(GPT *m, floatX *out, const floatX *x, size_t N, cudaStream_t s) {
    if (m->sp == 1) return x;
    Span span(m, s, "all-gather");
    NCCL_CHECK(ncclAllGather(x, out, N / m->sp * m->config.C, NCCL_FLOATX, m->tensor, s));
    return out;
}

// Operator f of the paper: identity (a gather) in forward, the sum in backward. The sum of dnorm into dreduced, and the
// gather of f's output again, which was not kept, run on a stream of their own and overlap compute.
static const floatX *f_forward(GPT *m, const floatX *x, size_t N) {
    return tensor_gather(m, m->gathered, x, N, m->stream);
}

static const floatX *f_again(GPT *m, const floatX *x) {
    if (m->sp == 1) return x;
    CUDA_CHECK(cudaEventRecord(m->computed, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->comm, m->computed, 0));
    tensor_gather(m, m->gathered, x, m->B * m->T, m->comm);
    CUDA_CHECK(cudaEventRecord(m->gathered_ready, m->comm));
    return m->gathered;
}

// Starts the sum. Weight gradients follow on the compute stream, which waits for f_again here.
static void f_backward_begin(GPT *m) {
    if (m->grid.t == 1) return;
    CUDA_CHECK(cudaEventRecord(m->computed, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->comm, m->computed, 0));
    tensor_sum(m, m->dreduced, m->dnorm, m->B * m->T, m->comm);
    CUDA_CHECK(cudaEventRecord(m->reduced_ready, m->comm));
    if (m->sp > 1) wait_for(m, m->gathered_ready, "wait tensor");
}

static void f_backward_end(GPT *m) {
    if (m->grid.t > 1) wait_for(m, m->reduced_ready, "wait tensor");
}

// Operator g: the sum in forward, identity (a gather) in backward.
static void g_forward(GPT *m, floatX *out, const floatX *partial, size_t N) {
    if (m->grid.t > 1) tensor_sum(m, out, partial, N, m->stream);
}

static const floatX *g_backward(GPT *m, const floatX *dout) {
    return tensor_gather(m, m->dgathered, dout, m->B * m->T, m->stream);
}

// Under sequence parallelism a rank's layernorm gradients cover its own rows: sums those in elements [lo, hi).
static void reduce_layernorms(GPT *m, size_t lo, size_t hi) {
    if (m->sp == 1) return;
    NCCL_CHECK(ncclGroupStart());
    for (size_t i = 0; i < m->table.count; i++) {
        const Tensor *x = &m->table.tensors[i];
        if (!(x->spec->flags & TENSOR_NORM) || x->offset < lo || x->offset >= hi) continue;
        float *dx = m->state.grads + x->offset;
        NCCL_CHECK(ncclAllReduce(dx, dx, x->size, ncclFloat, ncclSum, m->tensor, m->stream));
    }
    NCCL_CHECK(ncclGroupEnd());
}

// ---------------------------------------------------------------------------------------------------------------------
// Links between pipeline stages

// Enqueues the receipt of x (Nl, C) of N tokens from the neighbour: activations or gradients. Of t tensor ranks each
// gets 1/t from its counterpart and all gather (the scatter/gather optimisation); under sequence parallelism x is 1/t.
static void link_receive(GPT *m, StepKind kind, floatX *x, size_t N, int micro, int chunk) {
    LinkEnd *end = &m->receive[kind];
    size_t b = end->count++ % PIPELINE_BUFFERS, count = N * m->config.C / m->grid.t;
    CUDA_CHECK(cudaStreamWaitEvent(end->stream, end->ready[b], 0));
    Span span(m, end->stream, "recv", micro, chunk);
    NCCL_CHECK(ncclRecv(end->buffer[b], count, NCCL_FLOATX, 0, end->comm, end->stream));
    CUDA_CHECK(cudaEventRecord(end->moved[b], end->stream));
    wait_for(m, end->moved[b], "wait pipeline");
    if (m->sp > 1 || m->grid.t == 1) trainer_copy(m, x, end->buffer[b], count);
    else NCCL_CHECK(ncclAllGather(end->buffer[b], x, count, NCCL_FLOATX, m->tensor, m->stream));
    CUDA_CHECK(cudaEventRecord(end->ready[b], m->stream));
}

// Enqueues the sending of x to the neighbour; later work may overwrite x.
static void link_send(GPT *m, StepKind kind, const floatX *x, size_t N, int micro, int chunk) {
    LinkEnd *end = &m->send[kind];
    size_t b = end->count++ % PIPELINE_BUFFERS, count = N * m->config.C / m->grid.t;
    const floatX *mine = m->sp > 1 ? x : x + m->grid.t_rank * count;
    wait_for(m, end->moved[b], "wait pipeline");
    trainer_copy(m, end->buffer[b], mine, count);
    CUDA_CHECK(cudaEventRecord(end->ready[b], m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(end->stream, end->ready[b], 0));
    Span span(m, end->stream, "send", micro, chunk);
    NCCL_CHECK(ncclSend(end->buffer[b], count, NCCL_FLOATX, 1, end->comm, end->stream));
    CUDA_CHECK(cudaEventRecord(end->moved[b], end->stream));
}

// The chunk that starts from tokens, and the one that ends in the loss.
static bool is_first(const GPT *m, size_t chunk) { return m->table.shard.embedding && chunk == 0; }
static bool is_last(const GPT *m, size_t chunk) { return m->table.shard.head && chunk == m->plan.chunks - 1; }

// ---------------------------------------------------------------------------------------------------------------------
// Buckets: gradients are summed and weights are gathered over the data ranks

// Sums a bucket of gradients over the data ranks, on a stream of its own beside the backward pass; each rank ends with
// its part, and without ZeRO all of them with all parts.
static void reduce_bucket(GPT *m, size_t bucket) {
    size_t lo = m->table.buckets[bucket], hi = m->table.buckets[bucket + 1], part = (hi - lo) / m->grid.d;
    float *grads = m->state.grads + lo, *mine = grads + m->grid.d_rank * part;
    reduce_layernorms(m, lo, hi);
    if (m->grid.d == 1 || part == 0) return;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->data_stream, m->bucket_done, 0));
    Span span(m, m->data_stream, "reduce-scatter");
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
        Span span(m, m->data_stream, "all-gather");
        NCCL_CHECK(ncclAllGather(mine, params, part, NCCL_FLOATX, m->data, m->data_stream));
        CUDA_CHECK(cudaEventRecord(m->gathered_bucket[b], m->data_stream));
        if (!m->opt.overlap) CUDA_CHECK(cudaStreamWaitEvent(m->stream, m->gathered_bucket[b], 0));
    }
}

// Whether a bucket of gradients is complete once this micro-batch's backward is through, and its sum may overlap.
static bool reduce_now(const GPT *m, int micro) { return m->opt.overlap && (size_t)micro + 1 == m->micros; }

// Waits on the device until a bucket's weights have been gathered: called before they are read.
static void use_bucket(GPT *m, size_t bucket) {
    if (m->grid.d > 1 && m->opt.zero) wait_for(m, m->gathered_bucket[bucket], "wait data");
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward and backward

// One layer: x (Nl, C) -> out (Nl, C).
static void layer_forward(GPT *m, size_t l, LayerActs *a, floatX *out, const floatX *x, size_t B, size_t T) {
    size_t N = B * T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F;
    floatX **w = m->w[l];
    cudaStream_t s = m->stream;
    layernorm_forward(a->ln1, x, w[LN1W], w[LN1B], Nl, C, s);
    const floatX *ln1 = f_forward(m, a->ln1.out, N);
    matmul_forward(&m->matmul, a->qkv, ln1, w[QKVW], w[QKVB], N, C, 3 * A);
    if (out || m->opt.recompute != RECOMPUTE_REST)  // which has kept what attention wrote
        attention_forward(a->atty, a->lse, a->qkv, B, T, A, m->NH, s, drop(m, DROPOUT_SCORES, l));
    matmul_forward(&m->matmul, m->proj, a->atty, w[PROJW], NULL, N, A, C);
    g_forward(m, m->reduced, m->proj, N);
    layernorm_residual_forward(a->residual2, a->ln2, x, m->reduced, w[PROJB], w[LN2W], w[LN2B], Nl, C, s,
                               drop(m, DROPOUT_PROJ, l));
    const floatX *ln2 = f_forward(m, a->ln2.out, N);
    matmul_forward(&m->matmul, a->fch, ln2, w[FCW], w[FCB], N, C, F);
    gelu_forward(a->fch_gelu, a->fch, N * F, s);
    if (!out) return;  // recomputation: backward reads nothing of what follows
    matmul_forward(&m->matmul, m->proj, a->fch_gelu, w[FCPROJW], NULL, N, F, C);
    g_forward(m, m->reduced, m->proj, N);
    residual_forward(out, a->residual2, m->reduced, w[FCPROJB], Nl, C, s, drop(m, DROPOUT_FCPROJ, l));
}

// One layer: dresidual (Nl, C), the gradient of its output, becomes the gradient of its input x. The first micro-batch
// writes weight gradients and the others add to them (add).
static void layer_backward(GPT *m, size_t l, LayerActs *a, const floatX *x, bool add) {
    size_t B = m->B, T = m->T, N = B * T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F;
    floatX **w = m->w[l], *dresidual = m->dresidual;
    float **dw = m->dw[l], *scratch = m->reduce_scratch;
    cudaStream_t s = m->stream;
    if (m->opt.recompute >= RECOMPUTE_REST) layer_forward(m, l, a, NULL, x, B, T);
    if (m->opt.recompute == RECOMPUTE_GELU) gelu_forward(a->fch_gelu, a->fch, N * F, s);
    // the MLP
    const floatX *dout = dropout_backward(m->proj, dresidual, drop(m, DROPOUT_FCPROJ, l), Nl, C, s);
    dout = g_backward(m, dout);
    const floatX *ln2 = f_again(m, a->ln2.out);
    matmul_backward_input(&m->matmul, m->dfch, dout, w[FCPROJW], N, F, C);
    matmul_backward_weight(&m->matmul, dw[FCPROJW], a->fch_gelu, dout, N, F, C, add);
    bias_backward(dw[FCPROJB], dout, scratch, N, C, add, s);
    gelu_backward(m->dfch, dw[FCB], scratch, m->dfch, a->fch, N, F, add, s);
    matmul_backward_input(&m->matmul, m->dnorm, m->dfch, w[FCW], N, C, F);
    f_backward_begin(m);
    matmul_backward_weight(&m->matmul, dw[FCW], ln2, m->dfch, N, C, F, add);
    f_backward_end(m);
    layernorm_backward(dresidual, dw[LN2W], dw[LN2B], scratch, dresidual, m->dreduced, a->residual2, w[LN2W],
                       a->ln2, Nl, C, add, s);
    // the attention
    dout = dropout_backward(m->proj, dresidual, drop(m, DROPOUT_PROJ, l), Nl, C, s);
    dout = g_backward(m, dout);
    const floatX *ln1 = f_again(m, a->ln1.out);
    matmul_backward_input(&m->matmul, m->dnorm, dout, w[PROJW], N, A, C);
    matmul_backward_weight(&m->matmul, dw[PROJW], a->atty, dout, N, A, C, add);
    bias_backward(dw[PROJB], dout, scratch, N, C, add, s);
    attention_backward(m->dqkv, m->dattention, m->dnorm, a->atty, a->lse, a->qkv, B, T, A, m->NH, s,
                       drop(m, DROPOUT_SCORES, l));
    matmul_backward_input(&m->matmul, m->dnorm, m->dqkv, w[QKVW], N, C, 3 * A);
    f_backward_begin(m);
    matmul_backward_weight(&m->matmul, dw[QKVW], ln1, m->dqkv, N, C, 3 * A, add);
    bias_backward(dw[QKVB], m->dqkv, scratch, N, 3 * A, add, s);
    f_backward_end(m);
    layernorm_backward(dresidual, dw[LN1W], dw[LN1B], scratch, dresidual, m->dreduced, x, w[LN1W], a->ln1,
                       Nl, C, add, s);
}

// One chunk: tokens (B, T) or residual[0] -> lnf (Nl, C) or residual[L]. Tensor rank 0 adds the positions.
static void forward(GPT *m, Acts *acts, const int *inputs, size_t B, size_t T, int micro, int chunk) {
    size_t N = B * T, Nl = N / m->sp, C = m->config.C, L = m->plan.count[chunk], first = m->plan.first[chunk];
    floatX **w = m->w[0], *x = acts->residual[0];
    Span span(m, m->stream, "forward", micro, chunk);
    if (is_first(m, chunk)) {
        use_bucket(m, 0);
        use_bucket(m, 1);
        floatX *partial = m->sp > 1 ? m->proj : x;
        const floatX *wpe = m->grid.t_rank == 0 ? w[WPE] : NULL;
        encoder_forward(partial, inputs, w[WTE], wpe, B, T, C, m->V0, m->Vl, m->stream);
        g_forward(m, x, partial, N);
        dropout_forward(x, drop(m, DROPOUT_EMBEDDING, 0), Nl, C, m->stream);
    }
    for (size_t l = 0; l < L; l++) {
        use_bucket(m, 2 + first + l);
        layer_forward(m, first + l, &acts->layers[l], acts->residual[l + 1], acts->residual[l], B, T);
    }
    if (!is_last(m, chunk)) return;
    use_bucket(m, 0);  // the head is wte
    use_bucket(m, bucket_count(m) - 1);
    layernorm_forward(acts->lnf, acts->residual[L], w[LNFW], w[LNFB], Nl, C, m->stream);
}

// lnf (Nl, C) -> the sum of the micro-batch's losses; to train, the logits become their gradient, and dresidual (Nl, C)
// that of the last layer's output, both of the step's mean loss. Every rank has the logits of its part of the
// vocabulary; only three numbers a token travel: maximum, sum of exponentials, target logit.
static void loss(GPT *m, Acts *acts, const int *targets, int micro, bool training) {
    size_t N = m->B * m->T, Nl = N / m->sp, C = m->config.C, V = m->config.V, L = m->plan.count[m->plan.chunks - 1];
    floatX **w = m->w[0];
    float **dw = m->dw[0], *sum = m->row_sums, *target = m->row_sums + N, *losses = m->losses + micro * 2 * N;
    bool add = micro > 0;
    Span span(m, m->stream, "loss", micro);
    const floatX *lnf = f_forward(m, acts->lnf.out, N);
    linear_forward(&m->matmul, m->logits, lnf, w[WTE], NULL, N, C, m->Vl);
    classifier_stats(m->row_max_local, sum, target, m->logits, targets, N, V, m->Vl, m->V0, m->stream);
    NCCL_CHECK(ncclAllReduce(m->row_max_local, m->row_max, N, ncclFloat, ncclMax, m->tensor, m->stream));
    classifier_rescale(sum, m->row_max_local, m->row_max, N, m->stream);
    NCCL_CHECK(ncclAllReduce(m->row_sums, m->row_sums, 2 * N, ncclFloat, ncclSum, m->tensor, m->stream));
    classifier_gradient(losses, m->logits, m->row_max, sum, target, targets, m->dloss, N, V, m->Vl, m->V0, training,
                        m->stream);
    loss_sum(&m->loss_sums[micro], losses, N, m->stream);
    if (!training) return;
    linear_backward_input(&m->matmul, m->dnorm, m->logits, w[WTE], N, C, m->Vl);
    f_backward_begin(m);
    linear_backward_weight(&m->matmul, dw[WTE], lnf, m->logits, N, C, m->Vl, add);
    f_backward_end(m);
    layernorm_backward(m->dresidual, dw[LNFW], dw[LNFB], m->reduce_scratch, NULL, m->dreduced, acts->residual[L],
                       w[LNFW], acts->lnf, Nl, C, add, m->stream);
    if (reduce_now(m, micro)) reduce_bucket(m, bucket_count(m) - 1);
}

// One chunk: dresidual (Nl, C), which loss() or the next chunk has left -> gradients of its layers and embeddings.
static void backward(GPT *m, Acts *acts, const int *inputs, int micro, int chunk) {
    size_t B = m->B, T = m->T, Nl = B * T / m->sp, C = m->config.C;
    size_t L = m->plan.count[chunk], first = m->plan.first[chunk];
    floatX *dx = m->dresidual;
    bool add = micro > 0;
    Span span(m, m->stream, "backward", micro, chunk);
    for (size_t l = L; l-- > 0;) {
        layer_backward(m, first + l, &acts->layers[l], acts->residual[l], add);
        if (reduce_now(m, micro)) reduce_bucket(m, 2 + first + l);
    }
    if (!is_first(m, chunk)) return;
    const floatX *dout = dropout_backward(dx, dx, drop(m, DROPOUT_EMBEDDING, 0), Nl, C, m->stream);
    dout = g_backward(m, dout);
    encoder_backward(m->dw[0][WTE], m->dw[0][WPE], dout, inputs, B, T, C, m->config.maxT, m->V0, m->Vl, add, m->stream);
}

// A forward or backward with its messages. The host only enqueues. The products of a sample have new shapes, which
// load kernels: no message may be pending then (llmc/trainer/ranks.cuh).
static void forward_step(GPT *m, Acts *acts, const int *inputs, size_t B, size_t T, int micro, int chunk) {
    if (!is_first(m, chunk)) link_receive(m, STEP_FORWARD, acts->residual[0], B * T, micro, chunk);
    if (m->sample.running) trainer_synchronize(m);
    forward(m, acts, inputs, B, T, micro, chunk);
    if (!is_last(m, chunk)) link_send(m, STEP_FORWARD, acts->residual[m->plan.count[chunk]], B * T, micro, chunk);
}

static void backward_step(GPT *m, Acts *acts, const int *inputs, int micro, int chunk) {
    if (!is_last(m, chunk)) link_receive(m, STEP_BACKWARD, m->dresidual, m->B * m->T, micro, chunk);
    backward(m, acts, inputs, micro, chunk);
    if (!is_first(m, chunk)) link_send(m, STEP_BACKWARD, m->dresidual, m->B * m->T, micro, chunk);
}

// Runs this stage's list of steps: all of it to train, only the forwards to validate.
static void run_batch(GPT *m, bool training) {
    for (size_t i = 0; i < m->plan.step_count; i++) {
        PipelineStep step = m->plan.steps[i];
        size_t micro = step.micro, at = micro * m->B * m->T;
        Acts *acts = &m->slots[training ? m->plan.slot[i] : 0];
        if (micro >= m->micros) continue;  // the list is that of a full batch, --ramp begins with less
        dropout_at(m, micro);
        if (step.kind == STEP_FORWARD) forward_step(m, acts, m->inputs + at, m->B, m->T, micro, step.chunk);
        // The logits are made when their gradient is due: one buffer serves all micro-batches in flight.
        bool loss_now = is_last(m, step.chunk) && step.kind == (training ? STEP_BACKWARD : STEP_FORWARD);
        if (loss_now) loss(m, acts, m->targets + at, micro, training);
        if (step.kind == STEP_BACKWARD && training) backward_step(m, acts, m->inputs + at, micro, step.chunk);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

// One step: forward, backward and update over the next global batch.
static void train_step(GPT *m) {
    StepReport report = trainer_begin_step(m);
    if (m->embedding) zero_gradient(m, WTE);  // the head's gradient writes wte's, the encoder's adds to it
    run_batch(m, true);
    // With overlap those of wte and wpe are left, which the encoder's gradient completes.
    for (size_t b = 0; b < (m->opt.overlap ? 2 : bucket_count(m)); b++) reduce_bucket(m, b);
    CUDA_CHECK(cudaEventRecord(m->reduced_all, m->data_stream));
    if (m->grid.d > 1) wait_for(m, m->reduced_all, "wait data");
    sum_gradient(m, WTE, m->embedding);  // of two stages: each saw one use of the tied embedding
    trainer_norm(m, &report);
    trainer_adamw(m, &report);
    gather_weights(m);
    trainer_end_step(m, &report);
}

// Appends one token to the sample: the logits after the last of its T tokens say which.
static void sample_token(GPT *m) {
    size_t C = m->config.C, last = m->sample.T - 1;
    for (size_t c = 0; c < m->plan.chunks; c++)
        forward_step(m, m->slots, m->inputs, 1, m->sample.padded, NO_MICRO, c);
    if (m->table.shard.head) {
        const floatX *lnf = f_forward(m, m->slots[0].lnf.out, m->sample.padded);
        linear_forward(&m->matmul, m->logits, lnf + last * C, m->w[0][WTE], NULL, 1, C, m->Vl);
        NCCL_CHECK(ncclAllGather(m->logits, m->last_logits, m->Vl, NCCL_FLOATX, m->tensor, m->stream));
    }
    sample_append(m, m->last_logits);
}

// Makes one end of a link but for its communicator.
static void link_end_create(GPT *m, LinkEnd *end, const char *track) {
    end->stream = stream_create(m, track, true);
    for (int b = 0; b < PIPELINE_BUFFERS; b++) event_create(&end->moved[b]), event_create(&end->ready[b]);
}

// Makes the links, all ranks in the same order. Each carries one element at once: NCCL connects two ranks at their
// first message, and the host waits for it.
static void connect_links(GPT *m) {
    int p = (int)m->grid.p, stage = (int)m->grid.p_rank, from, to;
    link_end_create(m, &m->receive[STEP_FORWARD], "receive activations");
    link_end_create(m, &m->send[STEP_FORWARD], "send activations");
    link_end_create(m, &m->receive[STEP_BACKWARD], "receive gradients");
    link_end_create(m, &m->send[STEP_BACKWARD], "send gradients");
    for (int link = 0; link < pipeline_link_count(p); link++) {
        if (!pipeline_link_ends(p, (int)m->plan.chunks, link, &from, &to)) continue;
        ncclComm_t comm = job_split_link(&m->job, &m->grid, from, to);
        if (!comm) continue;
        LinkEnd *end = stage == from ? &m->send[link / p] : &m->receive[link / p];
        end->comm = comm;
        if (stage == from) NCCL_CHECK(ncclSend(m->proj, 1, NCCL_FLOATX, 1, comm, m->stream));
        else NCCL_CHECK(ncclRecv(m->proj, 1, NCCL_FLOATX, 0, comm, m->stream));
        CUDA_CHECK(cudaStreamSynchronize(m->stream));
    }
}

// Makes the communicators, with a stream of its own for each that overlaps compute.
// Then two micro-batches load all kernels while no message is pending: the second has dropout, and adds to gradients.
static void connect(GPT *m) {
    m->tensor = job_split_grid(&m->job, &m->grid, 't', "tensor", true);
    m->data = job_split_grid(&m->job, &m->grid, 'd', "data");
    event_create(&m->bucket_done), event_create(&m->reduced_all);
    host_array(m->gathered_bucket, bucket_count(m));
    for (size_t b = 0; b < bucket_count(m); b++) event_create(&m->gathered_bucket[b]);
    m->comm = stream_create(m, "all-reduce", true);
    event_create(&m->computed), event_create(&m->reduced_ready), event_create(&m->gathered_ready);
    connect_links(m);
    m->data_stream = stream_create(m, "data", true);
    if (m->grid.p > 1) m->embedding = job_split_grid(&m->job, &m->grid, 'e', "embedding");
    trainer_warm_up(m);
    if (m->grid.p == 1) return;
    for (int micro = 0; micro < 2; micro++) {
        trainer_set_dropout(m, micro == 1);
        for (size_t c = 0; c < m->plan.chunks; c++) {
            forward(m, m->slots, m->inputs, m->B, m->T, micro, c);
            if (is_last(m, c)) loss(m, m->slots, m->targets, micro, true);
            backward(m, m->slots, m->inputs, micro, c);
        }
    }
}

int main(int argc, char **argv) {
    static GPT gpt, *m = &gpt;
    trainer_open(m, argc, argv, OPTIONS_TENSOR | OPTIONS_PIPELINE | OPTIONS_DATA);  // bad input ends here
    shard(m);
    trainer_allocate(m, layout);
    connect(m);
    trainer_start(m);

    for (;;) {  // validation, save and sample if they are due, then one more step
        while (validation_goes_on(m)) run_batch(m, false);
        if (save_due(m)) trainer_save(m);
        while (sample_goes_on(m)) sample_token(m);
        if (is_last_step(m)) break;
        train_step(m);
    }
    return trainer_close(m);
}
