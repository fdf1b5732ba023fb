// documents.cuh: a ring's attention to documents: pairs of ranks whose queries see keys from
// their document's beginning on.
// lesson: documents
//
// defines: DocumentPair, document_step, attention_document_forward,
//          attention_document_backward
#ifndef LLMC_DOCUMENTS_CUH
#define LLMC_DOCUMENTS_CUH

#include "llmc/kernels/attention_first.cuh"
#include "llmc/kernels/context.cuh"

// first[B, rows] has a row of the other rank's keys for each of this rank's queries. The pair
// has some of both, from q_first and k_first on.
struct PairOfDocuments : AttentionPair {
    __device__ __forceinline__ size_t query_at(size_t b, size_t q) const {
        return b * rows + q_first + q;
    }
    __device__ __forceinline__ int key_row(int first_row) const {
        int row = first_row - (int)k_first;
        return row < 0 ? 0 : row < (int)Tk ? row : (int)Tk;
    }
};
typedef WithFirst<PairOfDocuments> DocumentPair;

// Returns the step, without its pair if no document joins a query to a key. scores: of each
// step.
static inline RingStep document_step(RingStep s, const double *scores) {
    if (scores[s.step] == 0) s.pair = {0, 0, 0, 0, true};
    return s;
}

static inline void document_launch(const AttentionPair &pair, FirstKeys keys, bool backward,
                                   cudaStream_t stream, Dropout d) {
    DocumentPair a = {};
    (AttentionPair &)a = pair;
    a.first = keys.first;
    attention_pair_cost(a, backward, keys.scores);
    attention_launch(a, d, backward, stream);
}

// Does the work of attention_pair_forward with the keys of the query's own document. A query
// that sees no key of this step has a part of weight 0.
static inline void attention_document_forward(const Ring &r, float *lse, const floatX *qkv,
                                              const RingStep &s, FirstKeys keys,
                                              cudaStream_t stream, Dropout d) {
    if (s.pair.Tq == 0) return;
    document_launch(pair_forward_of(r, lse, qkv, s), keys, false, stream, d);
}

// Computes what attention_pair_backward does.
static inline void attention_document_backward(const Ring &r, float *dot,
                                               const floatX *dout, const floatX *out,
                                               const float *lse, const floatX *qkv,
                                               const RingStep &s, FirstKeys keys,
                                               cudaStream_t stream, Dropout d) {
    if (s.pair.Tq == 0) return;
    document_launch(pair_backward_of(r, dot, dout, out, lse, qkv, s), keys, true, stream,
                    d);
}

#endif
