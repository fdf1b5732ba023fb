// checkpoint.h: saves and loads the state of training in a form that no layout determines.
// A checkpoint is a folder of these parts:
//   the unsharded model    config.json and model.safetensors, as Hugging Face's GPT-2 has them
//   the optimizer          optimizer.safetensors
//   the state of training  trainer.json
//   the tokenizer's files  if the folder that the weights came from has them
// Every rank reads and writes its own slices at their offsets.
//
// Saving has phases, and the trainer puts a barrier between them:
//   rank 0      checkpoint_create    Makes OUT/tmp-00000100-HOST-PID with files of full size,
//               and so meets a full disk.
//   every rank  slices_write         Writes its slices and syncs them to the disk.
//   all ranks   add up their Checksums, on rank 0.
//   rank 0      checkpoint_commit    Writes trainer.json, syncs, renames the folder to
//               OUT/step-00000100. A folder that cannot be renamed stays.
//   rank 0      checkpoint_prune     Removes old checkpoints (checkpoint_list.h).
// If one of the first two phases fails on any rank, the trainer calls checkpoint_remove on
// rank 0.
//
// A gradient dump has the same phases: slices_create of PATH.unfinished, slices_write,
// rename to PATH.
//
// defines: Kept, kept_read, kept_free, checkpoint_create, checkpoint_give_name,
//          checkpoint_commit, checkpoint_remove, checkpoint_is_ours, checkpoint_check,
//          checkpoint_sum, checkpoint_matches
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include <dirent.h>

#include "llmc/host/config_json.h"
#include "llmc/host/tensor_slices.h"
#include "llmc/host/trainer_json.h"

// ----------------------------------------------------------------------------------------
// Saving

// All files that a checkpoint may have, in the order of their removal. A folder without the
// first is no checkpoint. config.json is made first and removed last, because it says whose
// folder it is. So an interrupted removal can be completed.
static const char *const CHECKPOINT_FILES[] = {
    "trainer.json", "model.safetensors", "optimizer.safetensors", "generation_config.json",
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "config.json"};
enum {
    CHECKPOINT_FILE_COUNT = sizeof CHECKPOINT_FILES / sizeof CHECKPOINT_FILES[0],
    // Of CHECKPOINT_FILES, from here to the one before the last: they only go along.
    KEPT_FIRST = 3,
    KEPT_COUNT = CHECKPOINT_FILE_COUNT - 1 - KEPT_FIRST,
    KEPT_MOST_BYTES = 128 << 20
};

// The files in the folder of --init or --resume that training does not change. It comes
// out again in every checkpoint, so that this alone can be resumed, sampled and served.
// All NULL: random weights came from no folder.
typedef struct {
    char *config;             // the text of config.json
    char *files[KEPT_COUNT];  // of CHECKPOINT_FILES; NULL: not there
    size_t bytes[KEPT_COUNT];
} Kept;

static inline void kept_free(Kept *kept) {
    free(kept->config);
    for (int i = 0; i < KEPT_COUNT; i++) free(kept->files[i]);
    memset(kept, 0, sizeof *kept);
}

// Reads the files of a folder into memory, because a resume may remove the folder that it
// came from. No training needs the files beside config.json. One that cannot be read is
// left out with a note. Call kept_free in either case.
static inline bool kept_read(Kept *kept, const char *dir, Error *err) {
    char path[PATH_MAX];
    size_t bytes;
    struct stat info;
    Error why;
    memset(kept, 0, sizeof *kept);
    for (int i = 0; i < KEPT_COUNT; i++) {
        if (!path_print(path, err, "%s/%s", dir, CHECKPOINT_FILES[KEPT_FIRST + i]))
            return false;
        if (lstat(path, &info) != 0) continue;
        kept->files[i] = file_read(path, KEPT_MOST_BYTES, &kept->bytes[i], &why);
        if (kept->files[i]) continue;
        printf("note: checkpoints will not have %s: %s\n", CHECKPOINT_FILES[KEPT_FIRST + i],
               why.text);
    }
    if (!path_print(path, err, "%s/config.json", dir)) return false;
    kept->config = file_read(path, CONFIG_MAX_FILE, &bytes, err);
    return kept->config != NULL;
}

// Writes the kept files into a folder, without config.json.
static inline bool kept_write(const Kept *kept, const char *dir, Error *err) {
    char path[PATH_MAX];
    for (int i = 0; i < KEPT_COUNT; i++) {
        if (!kept->files[i]) continue;
        if (!path_print(path, err, "%s/%s", dir, CHECKPOINT_FILES[KEPT_FIRST + i]) ||
            !file_write(path, kept->files[i], kept->bytes[i], err))
            return false;
    }
    return true;
}

// True if a folder has config.json (which is made first) and otherwise nothing but files of a
// checkpoint.
static inline bool checkpoint_looks_ours(const char *path) {
    bool config = false;
    int others = -2;  // . and ..
    DIR *dir = opendir(path);
    while (dir && readdir(dir)) others++;
    for (int i = 0; i < CHECKPOINT_FILE_COUNT && dir; i++) {
        config = faccessat(dirfd(dir), CHECKPOINT_FILES[i], F_OK, AT_SYMLINK_NOFOLLOW) == 0;
        others -= config;  // in the end of config.json
    }
    if (dir) closedir(dir);
    return config && others == 0;
}

// True if the folder is the checkpoint of that step and nothing else. Only then may it be
// removed.
static inline bool checkpoint_is_ours(const char *path, size_t step) {
    TrainerState state;
    Error err;
    return checkpoint_looks_ours(path) && trainer_state_read(path, &state, &err) &&
           state.step == step;
}

// Removes the files of a checkpoint, complete or not, and the folder if nothing else is in
// it.
static inline void checkpoint_remove(const char *path) {
    int dir = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (dir < 0) return;
    for (int i = 0; i < CHECKPOINT_FILE_COUNT; i++) unlinkat(dir, CHECKPOINT_FILES[i], 0);
    close(dir);
    rmdir(path);
}

// Writes the name that a checkpoint has while it is being written. No other living process
// takes it, on any node.
static inline bool checkpoint_tmp_path(char path[PATH_MAX], const char *out_dir,
                                       size_t step, Error *err) {
    char host[65] = "";
    if (gethostname(host, sizeof host - 1) != 0 || strchr(host, '/')) strcpy(host, "host");
    return path_print(path, err, "%s/tmp-%08zu-%s-%ld", out_dir, step, host,
                      (long)getpid());
}

// Rank 0: makes the temporary folder and returns its path in tmp_path. The folder gets
// config.json, the files in `kept` (NULL: none) and the tensors' files at full size. lock:
// of checkpoint_claim. bf16: weights are stored as BF16 beside fp32 master weights. A
// failure leaves nothing.
static inline bool checkpoint_create(const char *out_dir, int *lock, size_t step,
                                     const GPTConfig *config, bool bf16, const Kept *kept,
                                     char tmp_path[PATH_MAX], Error *err) {
    char path[PATH_MAX];
    if (!folder_make(out_dir, err) || !folder_keep_lock(out_dir, lock, err) ||
        !checkpoint_tmp_path(tmp_path, out_dir, step, err))
        return false;
    checkpoint_remove(tmp_path);
    if (mkdir(tmp_path, 0777) != 0)
        return error_set(err, "cannot create %s: %s", tmp_path, strerror(errno));
    bool ok = path_print(path, err, "%s/config.json", tmp_path) &&
              config_write_again(path, config, bf16, kept ? kept->config : NULL, err) &&
              (!kept || kept_write(kept, tmp_path, err)) &&
              path_print(path, err, "%s/model.safetensors", tmp_path) &&
              slices_create(path, ST_START, config, STATE_WEIGHTS, STATE_WEIGHTS,
                            bf16 ? ST_BF16 : ST_F32, err) &&
              path_print(path, err, "%s/optimizer.safetensors", tmp_path) &&
              slices_create(path, ST_START, config, STATE_M, bf16 ? STATE_MASTER : STATE_V,
                            ST_F32, err);
    if (!ok) checkpoint_remove(tmp_path);
    return ok;
}

// Computes the sum of all but tensors: the state of training, its options, and the model's
// configuration.
static inline uint64_t checkpoint_state_sum(const GPTConfig *g, const TrainerState *state) {
    size_t sizes[] = {g->L, g->C, g->NH, g->V, g->maxT}, n = 0;
    uint64_t sum = 0;
    char value[TRAINER_VALUE_SIZE];
    for (int i = 0; i < 5; i++, n++) sum += checksum_element(n, (uint32_t)sizes[i]);
    for (int i = 0; i < TRAINER_KEY_COUNT; i++, n++) {
        json_print_field(state, &TRAINER_KEYS[i], value, sizeof value);
        bool zero = strcmp(value, "0") == 0 || strcmp(value, "\"\"") == 0;
        if ((TRAINER_KEYS[i].tags & KEY_SPARSE) && zero) continue;
        for (const char *c = value; *c; c++, n++)
            sum += checksum_element(n, (unsigned char)*c);
    }
    return sum;
}

// Computes the sum of config.json as it stands. checkpoint_state_sum covers the sizes in
// it, and all versions of the trainers write that sum. This one also covers members that no
// tensor's shape shows, for any kind of model. Checkpoints of earlier versions lack it.
static inline bool checkpoint_config_sum(const char *dir, uint64_t *sum, Error *err) {
    char path[PATH_MAX];
    size_t bytes;
    char *text = path_print(path, err, "%s/config.json", dir)
                     ? file_read(path, CONFIG_MAX_FILE, &bytes, err)
                     : NULL;
    if (!text) return false;
    *sum = 0;
    for (size_t i = 0; i < bytes; i++) *sum += checksum_element(i, (unsigned char)text[i]);
    free(text);
    return true;
}

// Returns the name of a sum: first all but tensors, then the tensors in the order of the
// files. NULL if the tensor has no such state.
static inline const char *checkpoint_sum_name(char name[STATE_NAME_SIZE],
                                              const Checksums *sums, size_t i) {
    if (i == 0) return "state";
    Tensor x = tensor_describe(&sums->config, (i - 1) % sums->tensors, 1, 0);
    StateKind kind = (StateKind)((i - 1) / sums->tensors);
    return state_has(&x, kind) ? state_name(name, &x, kind) : NULL;
}

// Gives a complete checkpoint in tmp_path its name. Replaces a checkpoint of the same step.
// Anything else that has the name is not ours, and gets the temporary name. False with an
// error message: the checkpoint stays in tmp_path.
static inline bool checkpoint_give_name(const char *tmp_path, const char *final_path,
                                        size_t step, Error *err) {
    Error why;
    bool named = folder_replace(tmp_path, final_path, &why);
    if (!named && errno == EXDEV && checkpoint_is_ours(final_path, step)) {
        // The old one can get no other name, but it can be removed. If we are killed here, the
        // next run gives ours the name.
        checkpoint_remove(final_path);
        named = rename(tmp_path, final_path) == 0;
    }
    if (!named)
        return error_set(err, "%s; the checkpoint is whole, and stays in %s", why.text,
                         tmp_path);
    if (checkpoint_is_ours(tmp_path, step))
        checkpoint_remove(tmp_path);  // the one that had the name
    return true;
}

// Writes trainer.json, which completes a checkpoint, and waits until all of the folder is
// on the disk.
static inline bool checkpoint_complete(const char *tmp_path, const TrainerState *state,
                                       Checksums *sums, Error *err) {
    char path[PATH_MAX], name[STATE_NAME_SIZE], *text;
    size_t bytes;
    uint64_t config;
    if (!path_print(path, err, "%s/trainer.json", tmp_path) ||
        !checkpoint_config_sum(tmp_path, &config, err))
        return false;
    sums->sums[0] = checkpoint_state_sum(&sums->config, state);
    FILE *out = open_memstream(&text, &bytes);
    trainer_state_print(out, state);
    for (size_t i = 0; i < sums->count; i++) {
        const char *of = checkpoint_sum_name(name, sums, i);
        if (!of) continue;
        fprintf(out, "%s\n    \"%s\": \"%016" PRIx64 "\"",
                i ? "," : ",\n  \"checksums\": {", of, sums->sums[i]);
    }
    fprintf(out, ",\n    \"config.json\": \"%016" PRIx64 "\"\n  }\n}\n", config);
    fclose(out);
    bool written = file_write_text(path, text, err);
    free(text);
    return written && folder_sync(tmp_path, err);
}

// Rank 0, after all have written: completes the folder and gives it its name OUT/step-<step>.
// Removes a folder that cannot be completed.
static inline bool checkpoint_commit(const char *out_dir, const char *tmp_path,
                                     const TrainerState *state, Checksums *sums,
                                     char final_path[PATH_MAX], Error *err) {
    bool whole = path_print(final_path, err, "%s/step-%08zu", out_dir, state->step) &&
                 checkpoint_complete(tmp_path, state, sums, err);
    if (!whole) checkpoint_remove(tmp_path);
    return whole && checkpoint_give_name(tmp_path, final_path, state->step, err) &&
           folder_sync(out_dir, err);
}

// ----------------------------------------------------------------------------------------
// Loading

// Checks every tensor of the first `kinds` kinds of state: it must be there with the right
// shape and type. The files must have no other weights. Adds up one share of all checksums.
// Without sums it comes before any allocation. It then reads only the headers, and a head that
// is stored beside the embedding that it is tied to.
static inline bool checkpoint_check(const char *dir, const GPTConfig *config, size_t kinds,
                                    size_t share, size_t shares, Checksums *sums,
                                    Error *err) {
    size_t piece = 0, tensors = count_tensors(config);
    bool ok = true;
    for (size_t k = 0; k < kinds && ok; k++) {
        SafeTensors st;
        if (!state_open(&st, dir, (StateKind)k, O_RDONLY, err)) return false;
        bool *used = (bool *)host_alloc(st.count, sizeof(bool));
        for (size_t id = 0; id < tensors && ok; id++) {
            Tensor x = tensor_describe(config, id, 1, 0);
            if (!state_has(&x, (StateKind)k)) continue;
            const STEntry *entry = slices_find(&st, &x, (StateKind)k, err);
            ok = entry && (!sums || st_sum(&st, entry, share, shares, &piece,
                                           &sums->sums[1 + k * tensors + id], err));
            if (ok) used[entry - st.entries] = true;
        }
        ok = ok && (k != STATE_WEIGHTS || slices_check_rest(&st, used, config, err));
        free(used);
        st_close(&st);
    }
    return ok;
}

// Looks at every file of a checkpoint. verify: adds up one share of the checksums of all
// tensors. The first share also covers the configuration and the state of training. The
// shares' sums add up to the sums of the whole files. The caller frees sums->sums in either
// case.
static inline bool checkpoint_sum(const char *dir, const ModelSpec *spec, size_t share,
                                  size_t shares, bool verify, Checksums *sums, Error *err) {
    TrainerState state;
    GPTConfig config;
    memset(sums, 0, sizeof *sums);
    if (!trainer_state_read(dir, &state, err) || !config_read(dir, spec, &config, err))
        return false;
    *sums = checksums_make(&config, state.bf16);
    if (share == 0) sums->sums[0] = checkpoint_state_sum(&config, &state);
    return checkpoint_check(dir, &config, state.bf16 ? 4 : 3, share, shares,
                            verify ? sums : NULL, err);
}

// Refuses a sum that differs from the sum in trainer.json, which has the name `of` there.
static inline bool checkpoint_same_sum(const char *dir, const char *file, const char *of,
                                       const char *was, uint64_t sum, Error *err) {
    char now[17];
    snprintf(now, sizeof now, "%016" PRIx64, sum);
    return strcmp(was, now) == 0 || error_set(err,
                                              "%s/%s is damaged: %s has the checksum %s "
                                              "instead of %.16s; take another checkpoint "
                                              "(--verify 0 takes this one as it is)",
                                              dir, file, of, now, was);
}

// Compares the sums of the whole files, the configuration and the state with the saved sums.
static inline bool checkpoint_matches(const char *dir, const Checksums *sums, Error *err) {
    char path[PATH_MAX], name[STATE_NAME_SIZE];
    cJSON *root = path_print(path, err, "%s/trainer.json", dir)
                      ? json_read(path, TRAINER_MAX_FILE, err)
                      : NULL;
    const cJSON *all = cJSON_GetObjectItemCaseSensitive(root, "checksums");
    const cJSON *saved = cJSON_IsObject(all) ? all->child : NULL;
    const char *config =
        cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(all, "config.json"));
    uint64_t sum;
    bool ok = root != NULL;
    for (size_t i = 0; i < sums->count && ok; i++) {
        const char *of = checkpoint_sum_name(name, sums, i);
        if (!of) continue;
        const char *was =
            saved && strcmp(saved->string, of) == 0 ? cJSON_GetStringValue(saved) : NULL;
        const char *file = i ? state_file((StateKind)((i - 1) / sums->tensors))
                             : "trainer.json or config.json";
        if (!was)
            ok = error_set(err, "%s has no checksum of %s (--verify 0 takes it as it is)",
                           path, of);
        if (was) ok = checkpoint_same_sum(dir, file, of, was, sums->sums[i], err);
        if (!ok) break;
        saved = saved->next;
    }
    if (ok && config)
        ok = checkpoint_config_sum(dir, &sum, err) &&
             checkpoint_same_sum(dir, "config.json", "the file", config, sum, err);
    cJSON_Delete(root);
    return ok;
}

#endif
