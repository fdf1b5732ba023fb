// train_documents.cu: train_context.cu for sequences of several documents.
// parent: dev/lessons/train_context.cu
//
// A token sees its own document only, and positions count from the document's beginning. So
// a sequence trains as its documents would one by one. A document begins at the token --eot.
// For each token the host stores where its document begins, one int. Attention skips all
// tiles before it. The ring skips all pairs of ranks that no document joins.
//
//
// Each of c neighbours of the d ranks has T/c tokens of a sequence. Only attention mixes
// tokens, in one of two ways. Ulysses (Jacobs et al. 2023): an all-to-all gives each rank
// all tokens of 1/c of the heads, and another one brings the outputs back. Ring (Liu et al.
// 2023): keys and values go round. Each rank attends to the ones that it has, and merges
// the outputs. --recompute rest keeps attention's output and computes the rest of a layer
// again. So no message travels twice (LightSeq, Li et al. 2023).
//
// The d/c groups share the global batch. A reduce-scatter sums each bucket of gradients
// (wte, wpe, each layer, ln_f) over all d ranks. ZeRO-1: each data rank then owns 1/d of
// every bucket, even where that cuts through a tensor, and updates it. The weights are
// gathered again while the next forward runs.
//
// Letters: B micro-batch (sequences), T sequence length, N = B*T tokens, C channels,
// L layers, NH heads, V vocabulary, Vp the same padded to 128. A shape stands behind every
// pointer. Weights are [in, out]: w[QKVW] is one of a layer, dw[QKVW] its gradient
// (llmc/model.h).
//
// The trainer train_gpt_tp.cu shares each layer among ranks, and has letters for a rank's
// part of it. Here a rank has whole layers:
//   A = C channels, in NHl = NH heads.
//   F = 4C hidden units.
//   Vl = Vp tokens of the vocabulary, from V0 = 0 on.
//   Nl = N/sp = N rows of the residual stream, as sp = 1.

// Trainer: everything but the mathematics: options, memory, data, optimizer, checkpoints
#include "llmc/trainer/split_data.cuh"
#include "llmc/host/context.h"
#include "llmc/host/documents.h"
#include "llmc/kernels/attention_first.cuh"
#include "llmc/kernels/classifier.cuh"
#include "llmc/kernels/context.cuh"
#include "llmc/kernels/documents.cuh"
#include "llmc/kernels/encoder.cuh"
#include "llmc/kernels/gelu.cuh"
#include "llmc/kernels/layernorm.cuh"
#include "llmc/kernels/matmul.cuh"

// ----------------------------------------------------------------------------------------
// The model and its memory

// The forward pass of a layer keeps these for its backward pass.
struct LayerActs {
    Layernorm ln1;      // (Nl, C)      with mean and rstd of each row
    floatX *qkv;        // (N, 3A)      queries, keys and values side by side
    float *lse;         // (B, NHl, T)  log-sum-exp of each query's scores
    floatX *atty;       // (N, A)       output of attention
    floatX *out;        // (B, cT, A/c) Ulysses: of 1/c of the heads, as are qkv and lse then
    floatX *residual2;  // (Nl, C)      residual stream between attention and MLP
    Layernorm ln2;      // (Nl, C)
    floatX *fch;        // (N, F)       hidden units before GELU
    floatX *fch_gelu;   // (N, F)       and behind it
};

// A micro-batch keeps these from its forward to its backward pass.
struct Acts {
    LayerActs *layers;  // [L]
    floatX **residual;  // [L + 1] of (Nl, C): the input of each layer, and that of ln_f
    Layernorm lnf;      // (Nl, C)
};

// The command line's.
struct Flags {
    Context context;
    Documents documents;
};

struct GPT : Trainer {
    // Context parallelism.
    Flags options;
    Context flags;              // the part about context, and this rank's of each sequence
    Context cut;                // of the tokens at hand: a sample of text is not cut
    ncclComm_t sequence;        // the c ranks that share each; NULL: not connected yet
    cudaStream_t ring_stream;
    cudaEvent_t computed;       // the ring's messages are read and written
    cudaEvent_t arrived;        // and the next ones have arrived
    floatX *leaving;            // (N, 3A)  what an all-to-all sends
    floatX *arriving;           // (N, 3A)  and received
    Ring ring;                  // keys, values and their gradients, which go round

    // Documents.
    int eot;              // the token that begins them
    int *first;           // (micros, c, B, T) first row of each ring step's keys that a query
                          // sees; without a ring (micros, B, cT), of whole sequences
    int *positions;       // (micros, B, T)   of this rank's tokens, in their documents
    int *host_first;      // the same two, pinned
    int *host_positions;
    int *document;        // [cT] where the document of each token of a sequence begins
    double *scores;       // [micros][c] pairs of a query and a key, of each ring step

    FirstKeys keys;              // of the current micro-batch
    const int *micro_positions;  // (B, T)
    const double *micro_scores;  // [c]

    ncclComm_t data;               // the d ranks, which all hold the whole model
    cudaStream_t data_stream;
    cudaEvent_t bucket_done;       // the next bucket to reduce or gather is written
    cudaEvent_t reduced_all;       // all buckets are reduced
    cudaEvent_t *gathered_bucket;  // [buckets] its weights are up to date on every data rank

    Acts acts;          // of the current micro-batch

    // The loss has the largest buffer, so its gradient takes the place of the logits.
    floatX *logits;     // (N, Vl)      become their own gradient
    float *row_max;     // (N)          the largest logit of a token
    float *row_sums;    // (2, N)       sum of the exponentials; logit of the target

    // One layer is at work at a time, so one set of these serves all.
    floatX *proj;       // (N, C)       output of a projection; gradient behind dropout
    floatX *dresidual;  // (Nl, C)      gradient of the residual stream
    floatX *dnorm;      // (N, C)       gradient of a layernorm's output; (N, A) of atty
    floatX *dqkv;       // (N, 3A)
    floatX *dfch;       // (N, F)
    float *dattention;  // (B, NHl, T)  scratch of attention's backward pass
    float *scratch;     // partial sums over rows, for gradients of biases and layernorms
};

// Makes this data rank the owner of 1/d of every bucket.
static void own_buckets(GPT *m, State *state) {
    for (size_t b = 0; b < bucket_count(m); b++) {
        size_t lo = m->table.buckets[b], hi = m->table.buckets[b + 1];
        size_t part = (hi - lo) / m->grid.d;
        state_own(state, lo + m->grid.d_rank * part, part);
    }
}

// Takes the whole model, in buckets that d ranks can share. This rank owns 1/d of the
// reduced gradients, and with ZeRO 1/d of the optimizer.
static void shard(GPT *m) {
    Shard mine = shard_whole(&m->config);
    mine.bucket_align = TENSOR_ALIGN * m->grid.d;
    trainer_shard(m, mine);

    own_buckets(m, &m->share);
    if (m->opt.zero)
        own_buckets(m, &m->state);
}

// Takes memory for the activations of one micro-batch. Recomputed activations live only
// while one layer is at work, so all layers can share the buffers of the first.
static void layout_acts(GPT *m, Arena *arena, Acts *acts) {
    size_t N = m->B * m->T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F;
    size_t L = m->config.L;
    size_t heads = context_is_ulysses(m->cut) ? N * A : 0;
    host_array(acts->layers, L);
    host_array(acts->residual, L + 1);

    // The input of each layer is always kept: the layer can be computed again from it.
    for (size_t l = 0; l <= L; l++)
        take(arena, acts->residual[l], Nl * C);

    for (size_t l = 0; l < L; l++) {
        LayerActs *a = &acts->layers[l];
        LayerActs *first = &m->acts.layers[0];
        if (m->opt.recompute == RECOMPUTE_LAYER && a != first) {
            *a = *first;  // all but its input, which residual has
            continue;
        }
        if (m->opt.recompute == RECOMPUTE_BUT_ATTENTION && a != first) {
            *a = *first;  // all but what attention wrote
            take(arena, a->lse, N * m->NHl);
            take(arena, a->atty, N * A);
            take(arena, a->out, heads);
            continue;
        }

        take_layernorm(arena, &a->ln1, Nl, C);
        take(arena, a->qkv, N * 3 * A);
        take(arena, a->lse, N * m->NHl);
        take(arena, a->atty, N * A);
        take(arena, a->out, heads);
        take(arena, a->residual2, Nl * C);
        take_layernorm(arena, &a->ln2, Nl, C);
        take(arena, a->fch, N * F);
        if (m->opt.recompute == RECOMPUTE_GELU && a != first)
            a->fch_gelu = first->fch_gelu;
        else
            take(arena, a->fch_gelu, N * F);
    }
    take_layernorm(arena, &acts->lnf, Nl, C);
}

// Takes memory for every buffer: called once to count bytes, and once to set pointers, so
// that --dry-run prints the bytes that training takes.
static void layout(GPT *m) {
    size_t N = m->B * m->T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F;
    Arena *arena = trainer_layout(m);

    // the loss
    take(arena, m->logits, N * m->Vl);
    take(arena, m->row_max, N);
    take(arena, m->row_sums, 2 * N);

    // one layer at a time
    take(arena, m->proj, N * C);
    take(arena, m->dresidual, Nl * C);
    take(arena, m->dnorm, N * C);
    take(arena, m->dqkv, N * 3 * A);
    take(arena, m->dfch, N * F);
    take(arena, m->dattention, N * m->NHl);
    take(arena, m->scratch, reduce_scratch_floats(N, C, F));

    // attention over ranks: of the two ways, one needs memory
    size_t all_to_all = context_is_ulysses(m->cut) ? N * 3 * A : 0;
    take(arena, m->leaving, all_to_all);
    take(arena, m->arriving, all_to_all);
    take_ring(arena, &m->ring, context_is_ring(m->cut) ? N : 0, A, m->NHl);

    // the first keys that queries see, and this rank's positions
    take(arena, m->first, m->micros * N * m->opt.context);
    take(arena, m->positions, m->micros * N);

    // all layers
    layout_acts(m, arena, &m->acts);
}

// ----------------------------------------------------------------------------------------
// Buckets: gradients are summed and weights are gathered over the data ranks

// Sums a bucket of gradients over the data ranks, on a stream of its own, so that it
// overlaps backward. Each rank gets its part of the sum, and without ZeRO all parts.
static void reduce_bucket(GPT *m, size_t bucket) {
    size_t lo = m->table.buckets[bucket], hi = m->table.buckets[bucket + 1];
    size_t part = (hi - lo) / m->grid.d;
    float *grads = m->state.grads + lo, *mine = grads + m->grid.d_rank * part;
    if (m->grid.d == 1 || part == 0) return;

    cudaStream_t s = m->data_stream;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(s, m->bucket_done, 0));
    Span span(m, s, "reduce-scatter");
    NCCL_CHECK(ncclReduceScatter(grads, mine, part, ncclFloat, ncclSum, m->data, s));
    if (!m->opt.zero)
        NCCL_CHECK(ncclAllGather(mine, grads, part, ncclFloat, m->data, s));
}

// Gathers the updated weights of all buckets, in the order in which forward needs them.
static void gather_weights(GPT *m) {
    if (m->grid.d == 1 || !m->opt.zero) return;
    cudaStream_t s = m->data_stream;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(s, m->bucket_done, 0));
    for (size_t b = 0; b < bucket_count(m); b++) {
        size_t lo = m->table.buckets[b], hi = m->table.buckets[b + 1];
        size_t part = (hi - lo) / m->grid.d;
        if (part == 0) continue;
        floatX *params = m->state.params + lo, *mine = params + m->grid.d_rank * part;
        Span span(m, s, "all-gather");
        NCCL_CHECK(ncclAllGather(mine, params, part, NCCL_FLOATX, m->data, s));
        CUDA_CHECK(cudaEventRecord(m->gathered_bucket[b], s));
        if (!m->opt.overlap)
            CUDA_CHECK(cudaStreamWaitEvent(m->stream, m->gathered_bucket[b], 0));
    }
}

// Returns true if this micro-batch's backward completes buckets of gradients, and their sums
// may overlap the rest of backward.
static bool reduce_now(const GPT *m, int micro) {
    return m->opt.overlap && (size_t)micro + 1 == m->micros;
}

// Waits on the device until a bucket's weights have been gathered: called before they are
// read.
static void use_bucket(GPT *m, size_t bucket) {
    if (m->grid.d > 1 && m->opt.zero)
        wait_for(m, m->gathered_bucket[bucket], "wait data");
}

// ----------------------------------------------------------------------------------------
// Documents

// Finds the documents of sequence i of a batch, which is cut over ranks that have T tokens
// each. This rank's tokens alone do not say where their documents begin.
static void find_documents(GPT *m, Context cut, size_t i, const int *tokens, size_t T) {
    bool ring = context_is_ring(cut);
    size_t steps = ring ? cut.c : 1;
    size_t whole = cut.c > 1 ? T * cut.c : T;
    size_t micro = i / m->B, b = i % m->B;
    int *positions = m->host_positions + i * T;
    double *scores = m->scores + micro * steps;
    document_keys(m->document, tokens, whole, m->eot);

    Tokens mine = context_tokens(cut);
    for (size_t t = 0; t < T; t++) {
        size_t position = tokens_position(mine, t);
        positions[t] = (int)position - m->document[position];
    }

    // Each step of the ring has other keys, so a query's first one has another row. Attention's
    // work is its pairs of a query and a key: a step without any is skipped.
    size_t rows = ring ? T : whole;
    for (size_t step = 0; step < steps; step++) {
        Tokens others = ring ? ring_step(cut, step, m->B, T, m->A, m->NHl).others : Tokens();
        int *first = m->host_first + ((micro * steps + step) * m->B + b) * rows;
        if (b == 0)
            scores[step] = 0;
        scores[step] += document_rows(first, m->document, ring ? mine : others, others, rows);
    }
}

// Takes each sequence of a batch that the trainer reads.
static void see_sequence(Trainer *trainer, size_t i, const int *tokens) {
    GPT *m = static_cast<GPT *>(trainer);
    find_documents(m, m->flags, i, tokens, m->T);
}

// Prepares the warm-up and simulations, which see sequences of one document: no pair is
// skipped.
static void start_documents(GPT *m) {
    size_t sequences = m->micros * m->B;
    pinned_array(m->host_first, sequences * m->opt.seq);
    pinned_array(m->host_positions, sequences * m->T);
    host_array(m->document, m->opt.seq);
    host_array(m->scores, m->micros * m->opt.context);

    int *tokens = NULL;
    host_array(tokens, m->opt.seq);
    for (size_t t = 0; t < m->opt.seq; t++)
        tokens[t] = m->eot + 1;  // not the one that begins a document
    for (size_t i = 0; i < sequences; i++)
        see_sequence(m, i, tokens);
    free(tokens);
    m->see_sequence = see_sequence;
}

// Copies the beginnings of documents and the positions of some sequences to the device.
static void copy_documents(GPT *m, size_t sequences, size_t T) {
    size_t bytes = sequences * T * sizeof(int);
    CUDA_CHECK(cudaMemcpyAsync(m->first, m->host_first, bytes * m->opt.context,
                               cudaMemcpyHostToDevice, m->stream));
    CUDA_CHECK(cudaMemcpyAsync(m->positions, m->host_positions, bytes,
                               cudaMemcpyHostToDevice, m->stream));
}

// Takes the documents of a micro-batch.
static void documents_at(GPT *m, size_t micro) {
    size_t N = m->B * m->T;
    size_t steps = context_is_ring(m->cut) ? m->cut.c : 1;
    m->micro_scores = m->scores + micro * steps;
    m->micro_positions = m->positions + micro * N;
    m->keys = {m->first + micro * N * m->opt.context, m->micro_scores[0]};
}

// The keys of a step of the ring.
static FirstKeys keys_of(const GPT *m, RingStep s) {
    return {m->keys.first + s.step * m->B * m->T, m->micro_scores[s.step]};
}

// ----------------------------------------------------------------------------------------
// Attention over the tokens of c ranks

// Sends part i of m->leaving[c, count] to rank i of the sequence, whose part arrives in
// place i of m->arriving.
static void all_to_all(GPT *m, size_t count) {
    if (!m->sequence) return;
    Span span(m, m->stream, "all-to-all");
    size_t here = m->cut.rank * count;
    trainer_copy(m, m->arriving + here, m->leaving + here, count);

    NCCL_CHECK(ncclGroupStart());
    for (size_t i = 0; i < m->cut.c; i++) {
        if (i == m->cut.rank) continue;
        floatX *to = m->leaving + i * count;
        floatX *from = m->arriving + i * count;
        NCCL_CHECK(ncclSend(to, count, NCCL_FLOATX, (int)i, m->sequence, m->stream));
        NCCL_CHECK(ncclRecv(from, count, NCCL_FLOATX, (int)i, m->sequence, m->stream));
    }
    NCCL_CHECK(ncclGroupEnd());
}

// Ulysses: local (N, parts, A), this rank's tokens, becomes whole (B, cT, parts, A/c), its
// heads of all tokens. One kernel puts a rank's message into one piece, the other puts the
// messages of all ranks in order.
static void gather_tokens(GPT *m, floatX *whole, const floatX *local, size_t B, size_t T,
                          size_t parts) {
    size_t c = m->cut.c;
    size_t width = parts * m->A / c;
    heads_cut(m->leaving, local, B * T, parts, m->A, c, m->stream);
    all_to_all(m, B * T * width);
    tokens_join(whole, m->arriving, B, T * c, width, c, m->cut.zigzag, m->stream);
}

// The reverse: whole (B, cT, parts, A/c) becomes local (N, parts, A).
static void scatter_tokens(GPT *m, floatX *local, const floatX *whole, size_t B, size_t T,
                           size_t parts) {
    size_t c = m->cut.c;
    size_t width = parts * m->A / c;
    tokens_cut(m->leaving, whole, B, T * c, width, c, m->cut.zigzag, m->stream);
    all_to_all(m, B * T * width);
    heads_join(local, m->arriving, B * T, parts, m->A, c, m->stream);
}

// Ring: while the keys and values of a step are at work, sends them to the next rank and
// receives those of the next step. Gradients follow one step behind: each goes to the
// rank to which its keys went.
static void ring_pass(GPT *m, size_t step, bool keys, bool gradients) {
    if (!m->sequence || (!keys && !gradients)) return;
    size_t count = m->B * m->T * 2 * m->A, c = m->cut.c;
    size_t now = step % 2, later = 1 - now;
    int next = (int)((m->cut.rank + 1) % c);
    int previous = (int)((m->cut.rank + c - 1) % c);
    floatX **kv = m->ring.kv;
    float **dkv = m->ring.dkv;
    cudaStream_t s = m->ring_stream;
    CUDA_CHECK(cudaEventRecord(m->computed, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(s, m->computed, 0));

    // Keys are floatX, as forward made them. Gradients are fp32, as many ranks add to them.
    // All four are one group: no rank waits in its send for a neighbour that sends, too.
    Span span(m, s, "ring");
    NCCL_CHECK(ncclGroupStart());
    if (keys) {
        NCCL_CHECK(ncclSend(kv[now], count, NCCL_FLOATX, next, m->sequence, s));
        NCCL_CHECK(ncclRecv(kv[later], count, NCCL_FLOATX, previous, m->sequence, s));
    }
    if (gradients) {
        NCCL_CHECK(ncclSend(dkv[later], count, ncclFloat, next, m->sequence, s));
        NCCL_CHECK(ncclRecv(dkv[now], count, ncclFloat, previous, m->sequence, s));
    }
    NCCL_CHECK(ncclGroupEnd());

    CUDA_CHECK(cudaEventRecord(m->arrived, s));
}

// a->qkv (N, 3A) -> a->atty (N, A). The output over all keys is a weighted mean of the
// outputs over parts of them. The weights are the parts' sums of exponentials, which lse
// has.
static void ring_forward(GPT *m, LayerActs *a, size_t B, size_t T, Dropout d) {
    size_t A = m->A;
    cudaStream_t s = m->stream;
    columns_move<false>(m->ring.kv[0], 2 * A, a->qkv + A, 3 * A, B, T, 0, T,
                        2 * A, s);

    for (size_t step = 0; step < m->cut.c; step++) {
        RingStep now = document_step(ring_step(m->cut, step, B, T, A, m->NHl),
                                     m->micro_scores);

        // The next keys travel while attention to these is computed.
        ring_pass(m, step, step + 1 < m->cut.c, false);
        attention_document_forward(m->ring, a->lse, a->qkv, now, keys_of(m, now), s, d);
        attention_merge(m->ring, a->lse, now, s);
        wait_for(m, m->arrived, "wait context");
    }
    columns_move<false>(a->atty, A, m->ring.sum, A, B, T, 0, T, A, s);
}

// m->dnorm (N, A), the gradient of a->atty -> m->dqkv (N, 3A). Backward needs no merging: it
// has the lse of all keys.
static void ring_backward(GPT *m, LayerActs *a, size_t B, size_t T, Dropout d) {
    size_t A = m->A, c = m->cut.c;
    cudaStream_t s = m->stream;
    columns_move<false>(m->ring.kv[0], 2 * A, a->qkv + A, 3 * A, B, T, 0, T,
                        2 * A, s);

    for (size_t step = 0; step < c; step++) {
        RingStep now = document_step(ring_step(m->cut, step, B, T, A, m->NHl),
                                     m->micro_scores);

        // A rank adds its part to the gradients of these keys once those of the ranks before
        // have arrived.
        ring_pass(m, step, step + 1 < c, step > 0);
        attention_document_backward(m->ring, m->dattention, m->dnorm, a->atty, a->lse,
                                    a->qkv, now, keys_of(m, now), s, d);
        wait_for(m, m->arrived, "wait context");
        ring_add(m->ring, now, s);
    }

    // The gradients have gone round but for the last step, which brings them home.
    ring_pass(m, c, false, true);
    wait_for(m, m->arrived, "wait context");
    floatX *dkv = m->dqkv + A;
    columns_move<false>(m->dqkv, 3 * A, m->ring.sum, A, B, T, 0, T, A, s);
    columns_move<false>(dkv, 3 * A, m->ring.dkv[c % 2], 2 * A, B, T, 0, T,
                        2 * A, s);
}

// a->qkv (N, 3A), of this rank's tokens -> a->atty (N, A). Backward may have kept the
// output (kept), and needs a->qkv again, under Ulysses with its own heads.
static void context_forward(GPT *m, LayerActs *a, size_t B, size_t T, Dropout d, bool kept) {
    size_t c = m->cut.c;
    size_t A = m->A, NHl = m->NHl;
    cudaStream_t s = m->stream;
    bool ulysses = context_is_ulysses(m->cut);

    // Ulysses: the input travels, attention runs as on one rank with fewer heads, and the
    // output travels back.
    if (ulysses)
        gather_tokens(m, a->qkv, a->qkv, B, T, 3);
    if (kept) return;

    if (context_is_ring(m->cut)) {
        ring_forward(m, a, B, T, d);
    } else if (ulysses) {
        attention_first_forward(a->out, a->lse, a->qkv, m->keys, B, T * c, A / c, NHl / c,
                                s, d);
        scatter_tokens(m, a->atty, a->out, B, T, 1);
    } else {
        attention_first_forward(a->atty, a->lse, a->qkv, m->keys, B, T, A, NHl, s, d);
    }
}

// m->dnorm (N, A), the gradient of a->atty -> m->dqkv (N, 3A). Under Ulysses both belong to
// other tokens and heads for a while, in buffers that attention leaves unused.
static void context_backward(GPT *m, LayerActs *a, size_t B, size_t T, Dropout d) {
    size_t c = m->cut.c;
    size_t A = m->A, NHl = m->NHl;
    cudaStream_t s = m->stream;
    floatX *dout = m->proj;  // (B, cT, A/c)
    floatX *dqkv = m->dfch;  // (B, cT, 3A/c)
    if (context_is_ring(m->cut)) {
        ring_backward(m, a, B, T, d);
    } else if (context_is_ulysses(m->cut)) {
        gather_tokens(m, dout, m->dnorm, B, T, 1);
        attention_first_backward(dqkv, m->dattention, dout, a->out, a->lse, a->qkv, m->keys,
                                 B, T * c, A / c, NHl / c, s, d);
        scatter_tokens(m, m->dqkv, dqkv, B, T, 3);
    } else {
        attention_first_backward(m->dqkv, m->dattention, m->dnorm, a->atty, a->lse, a->qkv,
                                 m->keys, B, T, A, NHl, s, d);
    }
}

// ----------------------------------------------------------------------------------------
// Forward and backward

// Runs one layer, x (Nl, C) -> out (Nl, C). Attention lets each token look at the tokens
// before it. The MLP looks at each token alone. Both add to the residual stream.
static void layer_forward(GPT *m, size_t l, LayerActs *a, floatX *out, const floatX *x,
                          size_t B, size_t T) {
    size_t N = B * T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F;
    floatX **w = m->w[l];
    Matmul *mm = &m->matmul;
    cudaStream_t s = m->stream;

    // attention: a token's query meets the keys of all tokens before it, and takes more of
    // the values whose keys are like it
    layernorm_forward(a->ln1, x, w[LN1W], w[LN1B], Nl, C, s);
    matmul_forward(mm, a->qkv, a->ln1.out, w[QKVW], w[QKVB], N, C, 3 * A);
    // Dropout numbers the heads of the whole model, also on a rank that has some of them.
    bool kept = !out && m->opt.recompute == RECOMPUTE_BUT_ATTENTION;
    Dropout scores = context_dropout(drop(m, DROPOUT_SCORES, l), m->cut, m->NHl);
    context_forward(m, a, B, T, scores, kept);
    matmul_forward(mm, m->proj, a->atty, w[PROJW], NULL, N, A, C);

    // Its bias, the sum and the next layernorm are one kernel: the row is read once.
    layernorm_residual_forward(a->residual2, a->ln2, x, m->proj, w[PROJB],
                               w[LN2W], w[LN2B], Nl, C, s, drop(m, DROPOUT_PROJ, l));

    // the MLP: four times as many hidden units as channels (F = 4C on a rank alone)
    matmul_forward(mm, a->fch, a->ln2.out, w[FCW], w[FCB], N, C, F);
    gelu_forward(a->fch_gelu, a->fch, N * F, s);
    if (!out) return;  // Backward computes a layer again up to here: it reads no more.

    matmul_forward(mm, m->proj, a->fch_gelu, w[FCPROJW], NULL, N, F, C);
    residual_forward(out, a->residual2, m->proj, w[FCPROJB], Nl, C, s,
                     drop(m, DROPOUT_FCPROJ, l));
}

// Runs one layer backward. dresidual (Nl, C), the gradient of its output, becomes the
// gradient of its input x. The gradient of a matrix product is two products, one for its
// input and one for its weight. Gradients of weights are sums over the micro-batches: the
// first one writes them, the others add to them (add).
static void layer_backward(GPT *m, size_t l, LayerActs *a, const floatX *x, bool add) {
    size_t B = m->B, T = m->T;
    size_t N = B * T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F;
    floatX **w = m->w[l];
    float **dw = m->dw[l];
    floatX *dresidual = m->dresidual;
    float *scratch = m->scratch;
    Matmul *mm = &m->matmul;
    cudaStream_t s = m->stream;

    // First recompute the buffers that forward did not keep: the whole layer from its
    // input, or only GELU's output from the hidden units.
    int again = m->opt.recompute;
    if (again == RECOMPUTE_LAYER || again == RECOMPUTE_BUT_ATTENTION)
        layer_forward(m, l, a, NULL, x, B, T);
    if (m->opt.recompute == RECOMPUTE_GELU)
        gelu_forward(a->fch_gelu, a->fch, N * F, s);

    // the MLP: a product's gradient for its input, then for its weight and for its bias
    const floatX *dout = dropout_backward(m->proj, dresidual,
                                          drop(m, DROPOUT_FCPROJ, l), Nl, C, s);
    matmul_backward_input(mm, m->dfch, dout, w[FCPROJW], N, F, C);
    matmul_backward_weight(mm, dw[FCPROJW], a->fch_gelu, dout, N, F, C, add);
    bias_backward(dw[FCPROJB], dout, scratch, N, C, add, s);
    gelu_backward(m->dfch, dw[FCB], scratch, m->dfch, a->fch, N, F, add, s);
    matmul_backward_input(mm, m->dnorm, m->dfch, w[FCW], N, C, F);
    matmul_backward_weight(mm, dw[FCW], a->ln2.out, m->dfch, N, C, F, add);

    // residual2 has gone past the MLP as well as through it: both gradients add up.
    layernorm_backward(dresidual, dw[LN2W], dw[LN2B], scratch, dresidual, m->dnorm,
                       a->residual2, w[LN2W], a->ln2, Nl, C, add, s);

    // attention: its backward pass computes the scores again, which are too many to keep
    dout = dropout_backward(m->proj, dresidual, drop(m, DROPOUT_PROJ, l), Nl, C, s);
    matmul_backward_input(mm, m->dnorm, dout, w[PROJW], N, A, C);
    matmul_backward_weight(mm, dw[PROJW], a->atty, dout, N, A, C, add);
    bias_backward(dw[PROJB], dout, scratch, N, C, add, s);
    Dropout scores = context_dropout(drop(m, DROPOUT_SCORES, l), m->cut, m->NHl);
    context_backward(m, a, B, T, scores);
    matmul_backward_input(mm, m->dnorm, m->dqkv, w[QKVW], N, C, 3 * A);
    matmul_backward_weight(mm, dw[QKVW], a->ln1.out, m->dqkv, N, C, 3 * A, add);
    bias_backward(dw[QKVB], m->dqkv, scratch, N, 3 * A, add, s);

    // x has gone past attention, too. dresidual is now the gradient of the layer before.
    layernorm_backward(dresidual, dw[LN1W], dw[LN1B], scratch, dresidual, m->dnorm,
                       x, w[LN1W], a->ln1, Nl, C, add, s);
}

// Runs the layers, tokens (B, T) -> lnf (Nl, C). The residual stream begins with a
// token's row of wte and its position's row of wpe.
static void forward(GPT *m, Acts *acts, const int *inputs, size_t B, size_t T, int micro) {
    size_t N = B * T, Nl = N / m->sp;
    size_t C = m->config.C, L = m->config.L;
    floatX **w = m->w[0];
    floatX *x = acts->residual[0];
    cudaStream_t s = m->stream;
    Span span(m, s, "forward", micro);

    // This is the only place where a token's position counts. To look up positions that
    // begin again with each document, take them for tokens of another vocabulary.
    use_bucket(m, 0);
    use_bucket(m, 1);
    encoder_forward(x, inputs, w[WTE], NULL, B, T, C, m->V0, m->Vl, s);
    encoder_forward(m->proj, m->micro_positions, w[WPE], NULL, B, T, C, 0,
                    m->config.maxT, s);
    columns_move<true>(x, C, m->proj, C, B, T, 0, T, C, s);
    dropout_forward(x, drop(m, DROPOUT_EMBEDDING, 0), Nl, C, s);

    for (size_t l = 0; l < L; l++) {
        use_bucket(m, BUCKET_LAYERS + l);
        layer_forward(m, l, &acts->layers[l], acts->residual[l + 1], acts->residual[l],
                      B, T);
    }

    use_bucket(m, bucket_count(m) - 1);
    layernorm_forward(acts->lnf, acts->residual[L], w[LNFW], w[LNFB], Nl, C, s);
}

// Computes the micro-batch's losses from lnf (Nl, C). To train, the logits become their
// own gradient, softmax minus target. The gradient of the last layer's output goes to
// dresidual (Nl, C). Both are gradients of the step's mean loss.
static void loss_and_gradient(GPT *m, Acts *acts, const int *targets, int micro,
                              bool training) {
    size_t N = m->B * m->T, Nl = N / m->sp;
    size_t C = m->config.C, L = m->config.L;
    size_t V = m->config.V, Vl = m->Vl, V0 = m->V0;
    floatX **w = m->w[0];
    float **dw = m->dw[0];
    float *sum = m->row_sums;
    float *target = sum + N;
    float *losses = trainer_losses(m, micro);
    bool add = micro > 0;
    Matmul *mm = &m->matmul;
    cudaStream_t s = m->stream;
    Span span(m, s, "loss", micro);

    // The head is wte once more: [out, in], as the linear_ functions have it. A softmax by
    // its largest logit does not overflow.
    linear_forward(mm, m->logits, acts->lnf.out, w[WTE], NULL, N, C, Vl);
    classifier_stats(m->row_max, sum, target, m->logits, targets, N, V, Vl, V0, s);
    classifier_gradient(losses, m->logits, m->row_max, sum, target, targets,
                        m->dloss, N, V, Vl, V0, training, s);

    // Losses are summed in double and in a fixed order, so that the sum is reproducible.
    loss_sum(&m->loss_sums[micro], losses, N, s);
    if (!training) return;

    // Backward begins: through the head, and through the last layernorm.
    linear_backward_input(mm, m->dnorm, m->logits, w[WTE], N, C, Vl);
    linear_backward_weight(mm, dw[WTE], acts->lnf.out, m->logits, N, C, Vl, add);
    layernorm_backward(m->dresidual, dw[LNFW], dw[LNFB], m->scratch, NULL, m->dnorm,
                       acts->residual[L], w[LNFW], acts->lnf, Nl, C, add, s);
    if (reduce_now(m, micro))
        reduce_bucket(m, bucket_count(m) - 1);
}

// Computes the gradients of all layers and of the embeddings. Takes dresidual (Nl, C) as
// loss_and_gradient has left it. The matrix wte has two uses: the lookup's gradient adds
// to the head's.
static void backward(GPT *m, Acts *acts, const int *inputs, int micro) {
    size_t B = m->B, T = m->T, Nl = B * T / m->sp;
    size_t C = m->config.C, L = m->config.L;
    float **dw = m->dw[0];
    bool add = micro > 0;
    cudaStream_t s = m->stream;
    Span span(m, s, "backward", micro);

    for (size_t l = L; l-- > 0;) {
        layer_backward(m, l, &acts->layers[l], acts->residual[l], add);
        if (reduce_now(m, micro))
            reduce_bucket(m, BUCKET_LAYERS + l);
    }

    const floatX *dout = dropout_backward(m->dresidual, m->dresidual,
                                          drop(m, DROPOUT_EMBEDDING, 0), Nl, C, s);
    size_t maxT = m->config.maxT;
    if (!add)
        CUDA_CHECK(cudaMemsetAsync(dw[WPE], 0, maxT * C * sizeof(float), s));
    encoder_backward(dw[WTE], NULL, dout, inputs, B, T, C, maxT, m->V0, m->Vl, add, s);
    encoder_backward(dw[WPE], NULL, dout, m->micro_positions, B, T, C, maxT, 0, maxT, add,
                     s);
}

// Runs all micro-batches of the global batch: with backward to train, without to validate.
// A micro-batch is as large as memory allows. The gradients of all are summed.
static void run_batch(GPT *m, bool training) {
    copy_documents(m, m->micros * m->B, m->T);
    for (size_t micro = 0; micro < m->micros; micro++) {
        size_t at = micro * m->B * m->T;
        dropout_at(m, micro);
        documents_at(m, micro);
        forward(m, &m->acts, m->inputs + at, m->B, m->T, micro);
        loss_and_gradient(m, &m->acts, m->targets + at, micro, training);
        if (training)
            backward(m, &m->acts, m->inputs + at, micro);
    }
}

// ----------------------------------------------------------------------------------------
// The run

// Runs one step over the next global batch: forward, backward and update. The norm of all
// gradients together decides if AdamW clips them.
static void train_step(GPT *m) {
    StepReport report = trainer_begin_step(m);
    run_batch(m, true);

    // The embeddings are the last to be complete: the encoder adds to the head's gradient.
    for (size_t b = 0; b < bucket_count(m); b++) {
        bool begun = m->opt.overlap && b >= BUCKET_LAYERS;  // by backward
        if (!begun)
            reduce_bucket(m, b);
    }
    CUDA_CHECK(cudaEventRecord(m->reduced_all, m->data_stream));
    if (m->grid.d > 1)
        wait_for(m, m->reduced_all, "wait data");

    trainer_norm(m, &report);
    trainer_adamw(m, &report);
    gather_weights(m);
    trainer_end_step(m, &report);
}

// Each rank computes a sample of T tokens alone: all have the same weights, and the same coin.
static void forward_alone(GPT *m, size_t T) {
    m->cut = Context();
    copy_documents(m, 1, T);
    documents_at(m, 0);
    forward(m, &m->acts, m->inputs, 1, T, NO_MICRO);
    m->cut = m->flags;
}

// Appends one token to the sample. Attention looks back only, so the last of its T tokens
// has the logits of the next one, and tokens behind it (padding) do no harm.
static void sample_token(GPT *m) {
    size_t C = m->config.C, last = m->sample.T - 1;
    find_documents(m, Context(), 0, m->host_inputs, m->sample.padded);
    forward_alone(m, m->sample.padded);

    const floatX *lnf = m->acts.lnf.out;
    linear_forward(&m->matmul, m->logits, lnf + last * C, m->w[0][WTE], NULL, 1, C, m->Vl);
    sample_append(m, m->logits);
}

// Makes the communicators, and a stream for each that overlaps compute.
static void connect(GPT *m) {
    m->data = job_split_grid(&m->job, &m->grid, 'd', "data");
    m->data_stream = stream_create(m, "data", true);
    event_create(&m->bucket_done);
    event_create(&m->reduced_all);
    host_array(m->gathered_bucket, bucket_count(m));
    for (size_t b = 0; b < bucket_count(m); b++)
        event_create(&m->gathered_bucket[b]);

    m->ring_stream = stream_create(m, "context", true);
    event_create(&m->computed);
    event_create(&m->arrived);

    start_documents(m);
    trainer_warm_up(m, run_batch);
    forward_alone(m, m->T);  // loads the attention of a sequence that is not cut

    size_t first = m->grid.d_rank - m->cut.rank;
    m->sequence = trainer_connect_data(m, first, m->cut.c, 1, "context");
}

// Checks this lesson's flags, once all others have been checked, and takes this rank's
// tokens.
static bool check_context(Trainer *trainer, Error *err) {
    GPT *m = static_cast<GPT *>(trainer);
    m->flags = m->options.context;
    // Neighbours among the data ranks share a sequence.
    m->flags.T = m->opt.seq;
    m->flags.rank = m->grid.d_rank % m->flags.c;
    m->cut = m->flags;
    m->tokens = context_tokens(m->flags);
    return context_check(m->flags, m->config.NH, m->opt.dropout > 0.0, err) &&
           document_check(&m->options.documents, m->config.V, err);
}

int main(int argc, char **argv) {
    static GPT gpt, *m = &gpt;
    FieldTable rows = {CONTEXT_OPTIONS, CONTEXT_OPTION_ROWS, &m->options};
    rows = document_options(rows, &m->options.documents, "1");
    Lesson lesson = {rows, check_context, NULL, context_sizes};
    trainer_open(m, argc, argv, OPTIONS_DATA, lesson);  // Bad input ends here.
    m->eot = document_token(&m->options.documents, &m->tokenizer, m->config.V);
    if (m->job.rank == 0)
        documents_print(&m->train_data, &m->progress, m->eot);
    shard(m);
    trainer_allocate(m, layout);
    connect(m);
    trainer_start(m);

    // Between two steps come validation, a checkpoint and a sample, each when it is due.
    for (;;) {
        while (validation_goes_on(m))
            run_batch(m, false);
        if (save_due(m))
            trainer_save(m);
        while (sample_goes_on(m))
            sample_token(m);
        if (is_last_step(m))
            break;
        train_step(m);
    }
    return trainer_close(m);
}
