// llama.h: train_llama for the page, with stubs for the parts that the other trainers lack:
// JSON, tokenizers, kernels.
//
// defines: llama::GPT and its functions
#ifndef EXPLORER_LLAMA_H
#define EXPLORER_LLAMA_H

#include "files.h"

#ifndef LLMC_JSON_H
#define LLMC_JSON_H
typedef struct cJSON {
    struct cJSON *next;
    const char *string, *valuestring;
    double valuedouble;
} cJSON;
DOES_NOTHING(bool, cJSON_IsObject, true)
DOES_NOTHING(bool, cJSON_IsString, true)
DOES_NOTHING(void, cJSON_Delete, )
DOES_NOTHING(cJSON *, json_read, NULL)
#define cJSON_ArrayForEach(item, list) for ((item) = (list); (item); (item) = (item)->next)
#endif
DOES_NOTHING(bool, cJSON_IsArray, true)
DOES_NOTHING(int, cJSON_GetArraySize, 0)
DOES_NOTHING(bool, json_whole, true)
DOES_NOTHING(bool, cJSON_IsNumber, true)
DOES_NOTHING(bool, cJSON_IsNull, true)
DOES_NOTHING(bool, cJSON_IsTrue, true)
DOES_NOTHING(cJSON *, cJSON_GetObjectItemCaseSensitive, NULL)
DOES_NOTHING(char *, cJSON_PrintUnformatted, NULL)

#define LLMC_CONFIG_JSON_H
DOES_NOTHING(bool, config_size, true)
DOES_NOTHING(bool, config_is, true)
DOES_NOTHING(bool, config_agree, true)
DOES_NOTHING(bool, config_listed, true)
DOES_NOTHING(bool, config_check_keys, true)
DOES_NOTHING(bool, file_write_text, true)
#define LLMC_HOST_DOCUMENTS_H
typedef struct {
    bool apart;
} Documents;
static inline FieldTable document_options(FieldTable table, Documents *, const char *) {
    return table;
}
DOES_NOTHING(bool, document_check, true)
DOES_NOTHING(int, document_token, -1)
DOES_NOTHING(void, documents_print, )
#define LLMC_TOKENIZER_KINDS_H
static inline bool tokenizer_open_kind(Tokenizer *, const Options *, Error *) { return true; }

#define LLMC_ROPE_CUH
#define LLMC_SWIGLU_CUH
#define LLMC_HEAD_NORM_CUH
#define LLMC_ATTENTION_FIRST_CUH
#include "llmc/host/first_keys.h"
typedef struct {
    floatX *x, *input;
    const floatX *weight_q, *weight_k;
    size_t N, NH, KV, HS;
    float epsilon;
} HeadNorm;
DOES_NOTHING(void, head_norm_forward, )
DOES_NOTHING(void, head_norm_backward, )
DOES_NOTHING(void, attention_first_forward, )
DOES_NOTHING(void, attention_first_backward, )
DOES_NOTHING(void, rope, )
DOES_NOTHING(void, swiglu_forward, )
DOES_NOTHING(void, swiglu_backward, )
DOES_NOTHING(void, relu2_forward, )
DOES_NOTHING(void, relu2_backward, )

#include "llmc/llama.h"
namespace llama {
#include "dev/lessons/train_llama.cu"
}
#endif
