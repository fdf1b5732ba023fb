// checkpoints.h: fuzz targets for checkpoints that one layout writes and another reads, and for
// folders of checkpoints that a user has changed.
//
// defines: fuzz_json, fuzz_config, fuzz_reshard, fuzz_folder
#ifndef DEV_FUZZ_CHECKPOINTS_H
#define DEV_FUZZ_CHECKPOINTS_H

#include "dev/fuzz/files.h"
#include "dev/test/verify.h"
#include "llmc/llama.h"

static char fuzz_out[64];  // the folder of this process, in memory where there is such a place
static int fuzz_lock = -1;

static void fuzz_empty_out(void) {
    char command[128];
    if (!fuzz_out[0]) {
        snprintf(fuzz_out, sizeof fuzz_out, "%s/llmc-fuzz-XXXXXX",
                 access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
        fuzz_promise(mkdtemp(fuzz_out) != NULL);
    }
    snprintf(command, sizeof command, "rm -rf %s", fuzz_out);
    fuzz_promise(system(command) == 0);
}

// Reads config.json and trainer.json.
static void fuzz_json(const uint8_t *data, size_t size) {
    char path[96];
    Error err;
    if (size < 1) return;
    if (!fuzz_out[0]) fuzz_empty_out();
    fuzz_promise(folder_make(fuzz_out, &err));
    snprintf(path, sizeof path, "%s/%s.json", fuzz_out, data[0] % 2 == 0 ? "config" : "trainer");
    FILE *file = file_open_output(path, O_WRONLY | O_TRUNC, &err);
    fuzz_promise(file != NULL && fwrite(data + 1, 1, size - 1, file) == size - 1 &&
                 fclose(file) == 0);
    if (data[0] % 2 == 0) {
        GPTConfig a, b;
        if (config_read(fuzz_out, NULL, &a, &err)) {
            size_t bytes;
            char *source = file_read(path, CONFIG_MAX_FILE, &bytes, &err);
            fuzz_promise(
                source &&
                config_write_again(path, &a, data[0] & 64, data[0] & 32 ? source : NULL, &err) &&
                config_read(fuzz_out, NULL, &b, &err));
            free(source);
            fuzz_promise(a.L == b.L && a.C == b.C && a.NH == b.NH && a.V == b.V && a.Vp == b.Vp &&
                         a.maxT == b.maxT);
        }
    } else {
        TrainerState a, b;
        if (trainer_state_read(fuzz_out, &a, &err)) {
            fuzz_promise(trainer_state_write(path, &a, NULL, &err) &&
                         trainer_state_read(fuzz_out, &b, &err));
            char *notes;
            size_t bytes;
            FILE *out = open_memstream(&notes, &bytes);
            bool same = trainer_state_compare(&a, &b, out, &err);
            fclose(out);
            free(notes);
            fuzz_promise(same && bytes == 0 && a.step == b.step && a.sample == b.sample);
        }
    }
}

// A sound config.json of each kind of model, in which members of all kinds are set. RoPE's stand
// for themselves.
static const char *const FUZZ_CONFIGS[] = {
    "{\"model_type\": \"gpt2\", \"n_embd\": 8, \"n_layer\": 2, \"n_head\": 2, \"vocab_size\": 9, "
    "\"n_positions\": 5}",
    "{\"model_type\": \"llama\", \"hidden_size\": 16, \"num_hidden_layers\": 2, "
    "\"num_attention_heads\": 4, "
    "\"intermediate_size\": 8, \"vocab_size\": 9, \"max_position_embeddings\": 5}",
    "{\"model_type\": \"qwen2\", \"hidden_size\": 16, \"num_hidden_layers\": 2, "
    "\"num_attention_heads\": 4, "
    "\"intermediate_size\": 8, \"vocab_size\": 9, \"max_position_embeddings\": 5, "
    "\"rope_theta\": 1e6}",
    "{\"model_type\": \"nemotron\", \"hidden_size\": 16, \"num_hidden_layers\": 2, "
    "\"num_attention_heads\": 4, "
    "\"intermediate_size\": 8, \"vocab_size\": 9, \"max_position_embeddings\": 5, "
    "\"num_key_value_heads\": 2}",
    "{\"model_type\": \"qwen3\", \"hidden_size\": 16, \"num_hidden_layers\": 2, "
    "\"num_attention_heads\": 4, \"head_dim\": 6, "
    "\"intermediate_size\": 8, \"vocab_size\": 9, \"max_position_embeddings\": 5}",
    "{\"model_type\": \"mistral\", \"hidden_size\": 16, \"num_hidden_layers\": 2, "
    "\"num_attention_heads\": 4, "
    "\"intermediate_size\": 8, \"vocab_size\": 9, \"max_position_embeddings\": 5}"};
static const char *const FUZZ_VALUES[] = {
    "null",
    "true",
    "false",
    "0",
    "1",
    "2",
    "4",
    "8",
    "16",
    "28",
    "-1",
    "0.5",
    "1.0",
    "1e-05",
    "1e999",
    "[]",
    "{}",
    "\"silu\"",
    "\"gelu_new\"",
    "\"float32\"",
    "\"bfloat16\"",
    "[\"full_attention\", \"full_attention\"]",
    "[\"full_attention\", \"sliding_attention\"]",
    "{\"rope_type\": \"default\", \"rope_theta\": 1e6}",
    "{\"rope_type\": \"default\", \"partial_rotary_factor\": 0.5}",
    "{\"type\": \"yarn\", \"factor\": 4.0}",
    ("{\"rope_type\": \"llama3\", \"factor\": 8.0, \"low_freq_factor\": 1.0, "
     "\"high_freq_factor\": 4.0, "
     "\"original_max_position_embeddings\": 8}"),
    "{\"rope_type\": \"llama3\", \"type\": \"default\", \"factor\": 0.1}"};

// The key of that number on the lists of all kinds of models; behind them one that is on none.
static const char *fuzz_key(size_t number, bool *listed) {
    const char *const *const names[] = {CONFIG_HARMLESS, GPT2_NAMES, LLAMA_NAMES_READ};
    const char *const(*const values[])[2] = {CONFIG_VALUES, GPT2_VALUES, LLAMA_VALUES};
    *listed = true;
    for (int list = 0; list < 3; list++) {
        for (const char *const *name = names[list]; *name; name++)
            if (number-- == 0) return *name;
        for (const char *const(*v)[2] = values[list]; (*v)[0]; v++)
            if (number-- == 0) return (*v)[0];
    }
    *listed = false;
    return "of_nobody";
}

// The kind of a model, and the struct that it was read into.
typedef struct {
    GPTConfig g;
    Llama m;
} FuzzModel;

static bool fuzz_read_model(FuzzModel *x, bool gpt2, Error *err) {
    memset(x, 0, sizeof *x);
    x->m.spec.read = llama_read, x->m.spec.write = llama_write;
    return config_read(fuzz_out, gpt2 ? NULL : &x->m.spec, &x->g, err);
}

static void fuzz_same_model(const FuzzModel *a, const FuzzModel *b, bool gpt2) {
    fuzz_promise(a->g.L == b->g.L && a->g.C == b->g.C && a->g.NH == b->g.NH && a->g.V == b->g.V &&
                 a->g.maxT == b->g.maxT);
    fuzz_promise(gpt2 || (a->m.type == b->m.type && a->m.tied == b->m.tied &&
                          memcmp(&a->m.KV, &b->m.KV, sizeof a->m - offsetof(Llama, KV)) == 0));
}

// Makes a configuration. The first byte takes one of FUZZ_CONFIGS, two more each set a member.
// If it can be read, it must come back from the file that is written, with the source and
// without. An unknown member is read only if it is null.
static void fuzz_config(const uint8_t *data, size_t size) {
    char path[96];
    Error err;
    FuzzModel a, b;
    bool unknown = false, listed;
    if (size < 1) return;
    if (!fuzz_out[0]) fuzz_empty_out();
    fuzz_promise(folder_make(fuzz_out, &err));
    snprintf(path, sizeof path, "%s/config.json", fuzz_out);
    bool gpt2 = data[0] % 6 == 0, bf16 = data[0] & 64;
    char *text = host_string(FUZZ_CONFIGS[data[0] % 6]);
    for (size_t i = 1; i + 1 < size && i < 40; i += 2) {
        const char *value = FUZZ_VALUES[data[i + 1] % (sizeof FUZZ_VALUES / sizeof FUZZ_VALUES[0])];
        const char *key = fuzz_key(data[i] % 140, &listed);
        text = json_set_member(text, key, value);
        if (!listed) unknown = strcmp(value, "null") != 0;
    }
    fuzz_promise(file_write_text(path, text, &err));
    if (fuzz_read_model(&a, gpt2, &err)) {
        fuzz_promise(!unknown);
        fuzz_promise(config_write_again(path, &a.g, bf16, text, &err) &&
                     fuzz_read_model(&b, gpt2, &err));
        fuzz_same_model(&a, &b, gpt2);
        fuzz_promise(config_write(path, &a.g, bf16, &err) && fuzz_read_model(&b, gpt2, &err));
        fuzz_same_model(&a, &b, gpt2);
    } else {
        fuzz_promise(strstr(err.text, path) != NULL);
    }
    free(text);
}

// Fills a rank's values, or compares them, with the model's elements: numbers that bf16 has.
static void fuzz_fill(const ParamTable *table, size_t lo, size_t hi, float *values,
                      StateKind kind, bool compare) {
    for (size_t i = 0, first, behind; i < table->count; i++) {
        const Tensor *x = &table->tensors[i];
        slice_of(x, lo, hi, &first, &behind);
        Run run;
        for (size_t r = 0; tensor_run(x, r, first, behind, &run); r++) {
            for (size_t j = 0; j < run.count; j++) {
                float *at = &values[x->offset + run.local + j];
                float value =
                    (float)((x->id * 7919 + (size_t)kind * 104729 + (run.global + j) * 31) % 256);
                if (compare) fuzz_promise(*at == value);
                else *at = value;
            }
        }
    }
}

typedef struct {
    size_t t, p, v, d;
} FuzzLayout;

// Has every rank of the layout write its slices, or read and compare them.
static void fuzz_ranks(const GPTConfig *config, FuzzLayout l, bool bf16, const char *dir,
                       Checksums *sums) {
    Error err;
    for (size_t rank = 0; rank < l.t * l.p * l.d; rank++) {
        size_t layers[16], n = 0, dr = rank / l.t % l.d, stage = rank / l.t / l.d,
                           chunks = l.p * l.v;
        for (size_t i = 0; i < config->L; i++)
            if (i * chunks / config->L % l.p == stage) layers[n++] = i;
        Shard shard;
        memset(&shard, 0, sizeof shard);
        shard.t = l.t, shard.t_rank = rank % l.t, shard.embedding = stage == 0,
        shard.head = stage == l.p - 1;
        shard.n_layers = n, shard.layers = layers;
        ParamTable table = table_make(config, shard);
        size_t lo = table.total * dr / l.d, hi = table.total * (dr + 1) / l.d;
        float *values = (float *)host_alloc(table.total + 1, sizeof(float));
        for (int k = 0; k < (bf16 ? 4 : 3); k++) {
            StateKind kind = (StateKind)k;
            if (sums) fuzz_fill(&table, lo, hi, values, kind, false);
            fuzz_promise(sums ? write_range(dir, kind, &table, values, lo, hi, sums, &err)
                              : read_range(dir, kind, &table, values, lo, hi, &err));
            if (!sums) fuzz_fill(&table, lo, hi, values, kind, true);
        }
        free(values);
        table_free(&table);
    }
}

static void fuzz_save(const GPTConfig *config, FuzzLayout l, bool bf16, size_t step,
                      char dir[PATH_MAX]) {
    char tmp[PATH_MAX];
    Error err;
    TrainerState state = {.step = step, .bf16 = bf16, .save = checkpoint_next_save(fuzz_out, 0)};
    char *words[] = {
        "train_gpt", "--seq", "8", "--global-batch", "8", "--steps", "9"};
    fuzz_promise(options_parse(&state.opt, NULL, 7, words, (RankOptions){}, &err));
    Checksums sums = checksums_make(config, bf16);
    fuzz_promise(checkpoint_create(fuzz_out, &fuzz_lock, step, config, bf16, NULL, tmp, &err));
    fuzz_ranks(config, l, bf16, tmp, &sums);
    fuzz_promise(checkpoint_commit(fuzz_out, tmp, &state, &sums, dir, &err));
    free(sums.sums);
}

static FuzzLayout fuzz_some_layout(uint8_t a, uint8_t b, size_t layers) {
    FuzzLayout l = {(size_t)1 << a % 3, 1 + a / 4 % 4, 1 + b % 3, 1 + b / 4 % 3};
    if (l.p * l.v > layers) l.v = 1;
    return l;
}

// Writes at one layout, verifies, reads at another.
static void fuzz_reshard(const uint8_t *data, size_t size) {
    char dir[PATH_MAX];
    Error err;
    if (size < 9) return;
    GPTConfig config = {4 + data[0] % 5,
                        4 * (1 + data[1] % 9),
                        4,
                        1 + data[2] + data[3] % 64,
                        0,
                        1 + data[3] % 12,
                        NULL};
    config.Vp = padded_vocabulary(config.V);
    fuzz_empty_out();
    fuzz_save(&config, fuzz_some_layout(data[4], data[5], config.L), data[8] & 1, 1, dir);
    fuzz_promise(checkpoint_verify(dir, &err));
    fuzz_ranks(&config, fuzz_some_layout(data[6], data[7], config.L), data[8] & 1, dir, NULL);
}

// Makes a folder of checkpoints by three bytes each: a save, a prune, or damage by people, disks
// and clocks. The checkpoint taken in the end must be sound, and must be the last save if that
// was left alone.
static void fuzz_folder(const uint8_t *data, size_t size) {
    static const GPTConfig tiny = {1, 4, 4, 5, 128, 3, NULL};
    static const FuzzLayout one = {1, 1, 1, 1};
    char dir[PATH_MAX], path[PATH_MAX + 32], command[4 * PATH_MAX], last[PATH_MAX] = "";
    Error err;
    fuzz_empty_out();
    for (size_t i = 0; i + 2 < size && i < 60; i += 3) {
        size_t step = data[i + 1] % 6, count = sizeof CHECKPOINT_FILES / sizeof CHECKPOINT_FILES[0];
        const char *file = CHECKPOINT_FILES[data[i + 2] % count];
        snprintf(dir, sizeof dir, "%s/step-%08zu", fuzz_out, step);
        snprintf(path, sizeof path, "%s/%s", dir, file);
        struct stat info;
        bool there = stat(path, &info) == 0, hit = strcmp(dir, last) == 0 && there;
        struct timespec times[2] = {{data[i + 2] * 10000000L, 0}, {data[i + 2] * 10000000L, 0}};
        int fd = there ? open(path, O_RDWR) : -1;
        char byte = 0;
        switch (data[i] % 8) {
            case 0: case 1: fuzz_save(&tiny, one, false, step, last), hit = false; break;
            case 2: checkpoint_prune(fuzz_out, data[i + 2] % 3, step), hit = false; break;
            case 3: fuzz_promise(!there || unlink(path) == 0); break;
            case 4:
                fuzz_promise(!there || ftruncate(fd, info.st_size * data[i + 2] / 256) == 0);
                break;
            case 5: if (there && info.st_size > 0) {
                        off_t at = info.st_size - 1 - data[i + 2] % info.st_size;
                        fuzz_promise(pread(fd, &byte, 1, at) == 1 &&
                                     (byte ^= 4, pwrite(fd, &byte, 1, at) == 1));
                    }
                    break;
            case 6: hit = there && utimensat(AT_FDCWD, path, times, 0) != 0; break;
            case 7: if (there) {
                    snprintf(command, sizeof command,
                             "rm -rf %s/step-%08zu; cp -r %s %s/step-%08zu", fuzz_out, step + 6,
                             dir, fuzz_out, step + 6);
                    fuzz_promise(system(command) == 0);
                    }
                    hit = true;  // a copy has the same count of saves
        }
        if (fd >= 0) close(fd);
        if (hit || (data[i] % 8 == 2 && last[0] && access(last, F_OK) != 0)) last[0] = '\0';
    }
    if (latest_sound(fuzz_out, true, dir, &err) && dir[0])
        fuzz_promise(checkpoint_verify(dir, &err));
    fuzz_promise(!last[0] || strcmp(dir, last) == 0);
}

#endif
