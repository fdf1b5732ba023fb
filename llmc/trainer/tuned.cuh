// tuned.cuh: the algorithms of cuBLASLt that `make tune` found to be the fastest on this GPU,
// build/gemm-GPU.json. A trainer uses the file if it finds it. A damaged file, or one of
// another GPU or cuBLASLt, ends the run. A trainer that ignored it would have other bits than
// its user expects.
//
// defines: TUNED_MAX_FILE, tuned_path, tuned_parse, trainer_tuned
#ifndef LLMC_TUNED_CUH
#define LLMC_TUNED_CUH

#include <ctype.h>

#include "llmc/trainer.cuh"

enum { TUNED_MAX_FILE = 1 << 20 };

// build/gemm-NVIDIA-H200.json
static inline void tuned_path(char path[PATH_MAX], const char *gpu) {
    int n = snprintf(path, PATH_MAX, "build/gemm-%.255s.json", gpu);
    for (char *c = path + strlen("build/gemm-"); c < path + n - strlen(".json"); c++) {
        if (!isalnum((unsigned char)*c)) *c = '-';
    }
}

// Returns {"gpu": name, "cublaslt": version, "products": {problem: number}}, or NULL with
// an error message if the text is not a file of this GPU. The caller frees it with
// cJSON_Delete.
static inline cJSON *tuned_parse(const char *text, size_t bytes, const char *path,
                                 const char *gpu, Error *err) {
    cJSON *root = json_parse(text, bytes, path, err), *product;
    if (!root) return NULL;
    uint64_t version = 0, number = 0;
    const char *of = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(root, "gpu"));
    const cJSON *products = cJSON_GetObjectItemCaseSensitive(root, "products");
    bool ok = of && strcmp(of, gpu) == 0 && cJSON_IsObject(products) &&
              json_whole(cJSON_GetObjectItemCaseSensitive(root, "cublaslt"), &version) &&
              version == cublasLtGetVersion();
    cJSON_ArrayForEach(product, products) {
        ok = ok && json_whole(product, &number) && number < GEMM_ALGORITHMS;
    }
    if (ok) return root;
    error_set(err, "%s is damaged, or not of %s with cuBLASLt %zu: remove it, then `make tune`",
              path, gpu, cublasLtGetVersion());
    cJSON_Delete(root);
    return NULL;
}

// Reads the file, if there is one. Rank 0 reads it for all, so that all have the same. All
// ranks call it.
static inline bool trainer_tuned(Trainer *m, Error *err) {
    char path[PATH_MAX], *text = NULL;
    size_t bytes = 0, size = 0;  // of the text, and with its NUL; 0: there is no file
    uint64_t sum = 0;
    bool ok = true;
    tuned_path(path, m->device.name);
    if (m->job.rank == 0 && access(path, F_OK) == 0) {
        text = file_read(path, TUNED_MAX_FILE, &bytes, err);
        ok = text != NULL;
        size = ok ? bytes + 1 : 0;
    }
    MPI_Bcast(&size, sizeof size, MPI_BYTE, 0, MPI_COMM_WORLD);
    if (size) {
        if (!text) text = (char *)host_alloc(size, 1);
        MPI_Bcast(text, (int)size, MPI_BYTE, 0, MPI_COMM_WORLD);
        cJSON *root = tuned_parse(text, size - 1, path, m->device.name, err);
        ok = root != NULL;
        m->matmul.tuned = cJSON_GetObjectItemCaseSensitive(root, "products");
        for (size_t i = 0; i < size; i++)
            sum += checksum_element(i, (unsigned char)text[i]);
        free(text);
    }
    if (m->matmul.tuned)
        printf("products     %d by the algorithms of %s\n",
               cJSON_GetArraySize(m->matmul.tuned), path);
    if (ok) progress_tuned(&m->progress, sum, m->opt.resume != NULL);
    return ok;
}

#endif
