// five.h: train_5d for the page, with stubs for the kernels of experts and of the ring, which
// train_llama lacks. In bf16 alone, since each precision takes its part of the page.
//
// defines: five::GPT and its functions
#ifndef EXPLORER_FIVE_H
#define EXPLORER_FIVE_H

#include "llama.h"

DOES_NOTHING(void, cJSON_DeleteItemFromObjectCaseSensitive, )
DOES_NOTHING(void, cJSON_AddItemToObject, )
DOES_NOTHING(cJSON *, cJSON_CreateNumber, NULL)
DOES_NOTHING(cJSON *, cJSON_CreateString, NULL)
DOES_NOTHING(cJSON *, config_read_kind, NULL)
DOES_NOTHING(bool, config_write_kind, true)
DOES_NOTHING(void, document_keys, )
DOES_NOTHING(void, window_keys, )
DOES_NOTHING(double, document_rows, 0)

#define LLMC_DOCUMENTS_CUH
#define LLMC_EXPONENTIAL_CUH
#define LLMC_MOE_LOG_H
DOES_NOTHING(void, moe_log, )
DOES_NOTHING(float, exponential, 0)
DOES_NOTHING(float, expf, 0)
DOES_NOTHING(float, logf, 0)
DOES_NOTHING(float, log1pf, 0)
DOES_NOTHING(float, __shfl_sync, 0)
DOES_NOTHING(size_t, lanes_before, 0)

// The parts of the ring's attention.
enum { DROPOUT_BLOCK = 8 };
typedef int Philox;
DOES_NOTHING(int, dropout_probability_block, 0)
struct Attention {
    const floatX *k, *v, *y, *dout;
    float *lse, *dot;
    size_t B, Tk, NH, KV, HS, k_stride, rows;
};
DOES_NOTHING(Attention, attention_of, Attention())
DOES_NOTHING(void, attention_cost, )
DOES_NOTHING(void, attention_launch, )
#include "llmc/kernels/context.cuh"
static inline RingStep document_step(RingStep step, const double *) { return step; }
DOES_NOTHING(void, attention_document_forward, )
DOES_NOTHING(void, attention_document_backward, )

#include "llmc/kernels/moe.cuh"
#include "llmc/model_5d.h"
#include "llmc/trainer/context_ranks.cuh"
#include "llmc/trainer/expert_ranks.cuh"
#include "llmc/trainer/moe_statistics.cuh"
namespace five {
#include "dev/lessons/train_5d.cu"
}
#endif
