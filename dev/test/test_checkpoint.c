// test_checkpoint.c: tests safetensors files and checkpoint folders. Every layout writes the same
// files and reads any other's bit for bit. Any fault of a file, a disk or a moment ends in one
// error message and does no other harm.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

// A folder that can have no other name, as one in a lower layer of overlayfs; NULL: none. The
// headers below rename with these two.
static const char *fixed_folder;

static int rename_unless_fixed(const char *from, const char *to) {
    if (!fixed_folder || strcmp(from, fixed_folder) != 0) return (rename)(from, to);
    errno = EXDEV;
    return -1;
}

static long exchange_unless_fixed(long number, int a, const char *from, int b, const char *to,
                                  unsigned flags) {
    if (!fixed_folder || strcmp(to, fixed_folder) != 0)
        return (syscall)(number, a, from, b, to, flags);
    errno = EXDEV;
    return -1;
}

#define rename(from, to) rename_unless_fixed(from, to)
#define syscall(number, a, from, b, to, flags) exchange_unless_fixed(number, a, from, b, to, flags)
#include "llmc/host/checkpoint_list.h"
#include "llmc/llama.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#include "dev/test/check.h"
#include "dev/test/files.h"
#include "dev/test/verify.h"

static size_t count_entries(const char *dir);

static Check checks;
static char root[256];  // where this run keeps its files
static int lock, no_lock = -1;  // of the last folder that was claimed; of none

static const char *in_root(const char *name) { return in(root, name); }

static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 31) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 29) * 0xbf58476d1ce4e5b9u;
    return x ^ x >> 32;
}

// Returns true if two safetensors files have the same bytes behind their headers.
static bool same_tensors(const char *a, const char *b) {
    size_t na, nb;
    uint64_t x, y;
    char *one = read_file(a, &na), *other = read_file(b, &nb);
    memcpy(&x, one, sizeof x), memcpy(&y, other, sizeof y);
    bool same = na - x == nb - y && memcmp(one + 8 + x, other + 8 + y, na - 8 - x) == 0;
    free(one);
    free(other);
    return same;
}

// data: NULL for any.
static void write_safetensors(const char *path, const char *header, const void *data,
                              size_t data_bytes) {
    uint64_t n = strlen(header);
    char *file = allocate(8 + n + data_bytes);
    memcpy(file, &n, 8);
    memcpy(file + 8, header, n);
    if (data) memcpy(file + 8 + n, data, data_bytes);
    else memset(file + 8 + n, 0x11, data_bytes);
    write_file(path, file, 8 + n + data_bytes);
    free(file);
}

// ----------------------------------------------------------------------------------------
// safetensors.h

typedef struct {
    const char *what, *header;
    size_t data;
    const char *says;  // NULL: the file is sound
} HeaderCase;

#define TENSOR(name, shape, offsets) \
    "\"" name "\":{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
#define ONE_TENSOR(shape, offsets) "{" TENSOR("x", shape, offsets) "}"
#define X TENSOR("x", "[2]", "[0,8]")
static const HeaderCase HEADERS[] = {
    {"one tensor", "{" X "}", 8, NULL},
    {"padding and metadata", "{\"__metadata__\":{\"format\":\"pt\"}," X "}    ", 8, NULL},
    {"no tensors", "{}", 0, NULL},
    {"a scalar and an empty tensor",
     "{\"a\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]},"
     "\"b\":{\"dtype\":\"BF16\",\"shape\":[3,0,99999999],\"data_offsets\":[8,8]}}",
     8, NULL},
    {"not JSON", "{\"x\":", 8, "not valid JSON"},
    {"an array", "[1]", 8, "not a JSON object"},
    {"a number", "1", 8, "not a JSON object"},
    {"text behind", "{" X "} x", 8, "not valid JSON"},
    {"NaN offset", ONE_TENSOR("[2]", "[NaN,8]"), 8, "not valid JSON"},
    {"infinite offset", ONE_TENSOR("[2]", "[0,1e999]"), 8, "absurd data_offsets"},
    {"negative offset", ONE_TENSOR("[2]", "[-8,0]"), 8, "absurd data_offsets"},
    {"fractional offset", ONE_TENSOR("[2]", "[0,8.5]"), 8, "absurd data_offsets"},
    {"offset above 2^53", ONE_TENSOR("[2]", "[9007199254740993,9007199254741001]"), 8,
     "absurd data_offsets"},
    {"swapped offsets", ONE_TENSOR("[2]", "[8,0]"), 8, "absurd data_offsets"},
    {"three offsets", ONE_TENSOR("[2]", "[0,4,8]"), 8, "two data_offsets"},
    {"offsets behind the end", ONE_TENSOR("[2000]", "[0,8000]"), 8, "truncated"},
    {"a hole at the start", ONE_TENSOR("[2]", "[8,16]"), 16, "hole"},
    {"bytes behind the last tensor", "{" X "}", 9, "belong to no tensor"},
    {"overlap", "{" X "," TENSOR("y", "[2]", "[4,12]") "}", 12, "overlaps"},
    {"the same name twice", "{" X "," TENSOR("x", "[2]", "[8,16]") "}", 16, "twice"},
    {"the same member twice", ONE_TENSOR("[2],\"shape\":[2]", "[0,8]"), 8, "twice"},
    {"shape against offsets", ONE_TENSOR("[3]", "[0,8]"), 8, "contradict"},
    {"size past 2^64", ONE_TENSOR("[4294967296,4294967296,4]", "[0,0]"), 0, "absurd shape"},
    {"bytes past 2^64",
     "{\"x\":{\"dtype\":\"F64\",\"shape\":[4294967296,536870912],\"data_offsets\":[0,0]}}", 0,
     "contradict"},
    {"negative size", ONE_TENSOR("[-2]", "[0,8]"), 8, "absurd shape"},
    {"a size that is text", ONE_TENSOR("[\"2\"]", "[0,8]"), 8, "absurd shape"},
    {"nine dimensions", ONE_TENSOR("[1,1,1,1,1,1,1,1,2]", "[0,8]"), 8, NULL},
    {"a dtype of later files",
     "{\"x\":{\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[0,1]}," TENSOR("y", "[2]",
                                                                              "[1,9]") "}",
     9, NULL},
    {"a dtype of later files with a hole",
     "{\"x\":{\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[1,2]}}", 2, "hole"},
    {"no dtype", "{\"x\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "lacks a dtype"},
    {"a tensor that is a number", "{\"x\":1}", 8, "lacks a dtype"},
    {"a name with an escape sequence", "{\"\\u001b[2J\":1}", 8, "tensor ?[2J lacks a dtype"},
};

static void test_headers(void) {
    Error err;
    SafeTensors st;
    const char *path = in_root("header.safetensors");
    for (size_t i = 0; i < sizeof HEADERS / sizeof HEADERS[0]; i++) {
        const HeaderCase *c = &HEADERS[i];
        write_safetensors(path, c->header, NULL, c->data);
        bool opened = st_open(&st, path, O_RDONLY, &err);
        if (opened) st_close(&st);
        check(&checks, opened == !c->says && (opened || says(&err, c->says)), "header: %s",
              c->what);
    }
    size_t deep = 200000;
    char *text = allocate(deep);
    memset(text, '[', deep);
    memcpy(text, "{\"x\":", 5);
    text[deep - 1] = '\0';
    write_safetensors(path, text, NULL, 0);
    check(&checks, !st_open(&st, path, O_RDONLY, &err) && says(&err, "not valid JSON"),
          "header: nesting of 200000");
    memset(text, 'n', deep);
    memcpy(text, "{\"", 2);
    memcpy(text + deep - 6, "\":1}", 5);
    write_safetensors(path, text, NULL, 0);
    check(&checks, !st_open(&st, path, O_RDONLY, &err) && says(&err, "tensor nnn"),
          "header: name of 200000 characters");
    free(text);
    uint64_t claims[] = {9, 100000001, (uint64_t)1 << 63, UINT64_MAX, UINT64_MAX - 7};
    bool ok = true;
    for (int i = 0; i < 5; i++) {
        char file[16] = "";
        memcpy(file, &claims[i], 8);
        write_file(path, file, 16);
        ok &= !st_open(&st, path, O_RDONLY, &err) &&
              says(&err, i ? "header claims" : "truncated inside its header");
    }
    check(&checks, ok, "header: absurd lengths");
    ok = !st_open(&st, in_root("missing"), O_RDONLY, &err) && says(&err, "No such file");
    ok &= !st_open(&st, root, O_RDONLY, &err) && says(&err, "not a regular file");
    ok &= mkfifo(in_root("pipe"), 0600) == 0 && !st_open(&st, in_root("pipe"), O_RDONLY, &err) &&
          says(&err, "not a regular file");
    check(&checks, ok, "missing file, folder, pipe");
}

// Returns true if a damaged file is refused by an error that names it, or opens and each of
// its tensors can be read. Counts the two cases. The address sanitizer sees a read that goes
// too far.
static bool refused_or_readable(const char *path, size_t count[2]) {
    Error err = {""};
    SafeTensors st;
    bool opened = st_open(&st, path, O_RDONLY, &err), ok = true;
    count[opened]++;
    if (!opened) return says(&err, path);
    float *out = allocate(65536 * sizeof(float));
    for (size_t i = 0; i < st.count && ok; i++) {
        if (st.entries[i].count <= 65536 && st.entries[i].dtype < ST_OTHER)
            ok = st_read_floats(&st, &st.entries[i], 0, st.entries[i].count, out, &err);
    }
    free(out);
    st_close(&st);
    return ok;
}

static void test_damage(void) {
    Error err;
    SafeTensors st;
    const char *path = in_root("damage.safetensors");
    write_safetensors(
        path,
        ST_START
        ",\"wte.weight\":{\"dtype\":\"F32\",\"shape\":[5,3],\"data_offsets\":[0,60]},"
        "\"b\":{\"dtype\":\"BF16\",\"shape\":[7],\"data_offsets\":[60,74]}}       ",
        NULL, 74);
    bool ok = true;
    size_t bytes;
    char *sound = read_file(path, &bytes);
    for (size_t n = bytes; n-- > 0;) {
        ok &= truncate(path, (off_t)n) == 0 && !st_open(&st, path, O_RDONLY, &err) &&
              says(&err, path);
    }
    check(&checks, ok, "each of %zu truncations is refused", bytes);
    char *broken = allocate(bytes);
    size_t count[2] = {0, 0};
    ok = true;
    for (uint64_t i = 0; i < 4000; i++) {
        memcpy(broken, sound, bytes);
        for (uint64_t k = 0; k <= i % 3; k++) {
            size_t place = mix(i * 8 + k) % (bytes - 44);
            uint64_t random = mix(i * 9 + k);
            broken[place] = i % 2 ? "0123456789[]{},\":eE.-"[random % 21] : (char)random;
        }
        write_file(path, broken, bytes);
        if (ok && !refused_or_readable(path, count)) {
            printf("     damage %llu\n", (unsigned long long)i);
            ok = false;
        }
    }
    check(&checks, ok && count[0] + count[1] == 4000 && count[0] > 1000 && count[1] > 100,
          "4000 damaged headers: %zu are refused by the file's name, %zu open and can be read",
          count[0], count[1]);
    free(broken);
    free(sound);
}

static float float_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void test_types(void) {
    Error err;
    SafeTensors st;
    const char *path = in_root("types.safetensors");
    static const char header[] =
        "{\"h\":{\"dtype\":\"F16\",\"shape\":[65536],\"data_offsets\":[0,131072]},"
        "\"b\":{\"dtype\":\"BF16\",\"shape\":[65536],\"data_offsets\":[131072,262144]},"
        "\"d\":{\"dtype\":\"F64\",\"shape\":[65536],\"data_offsets\":[262144,786432]},"
        "\"i\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[786432,786440]}}";
    char *data = allocate(786440);
    for (int i = 0; i < 65536; i++) {
        uint16_t half = (uint16_t)i;
        double wide = (i - 30000) / 7.0;
        memcpy(data + 2 * i, &half, 2);
        memcpy(data + 131072 + 2 * i, &half, 2);
        memcpy(data + 262144 + 8 * i, &wide, 8);
    }
    write_safetensors(path, header, data, 786440);
    free(data);
    if (!check(&checks, st_open(&st, path, O_RDONLY, &err), "a file of all types opens")) return;
    float *out = allocate(65536 * sizeof(float));
    bool half_ok = st_read_floats(&st, st_find(&st, "h"), 0, 65536, out, &err), brain_ok, wide_ok;
    for (int i = 0; i < 65536; i++) {
        int e = i >> 10 & 31, f = i & 1023;
        double wanted = e ? ldexp(1024 + f, e - 25) : ldexp(f, -24);
        if (e == 31) half_ok &= f ? isnan(out[i]) : isinf(out[i]) && (out[i] < 0) == (i >> 15);
        else
            half_ok &= (double)out[i] == (i >> 15 ? -wanted : wanted) &&
                       !signbit(out[i]) == !(i >> 15);
    }
    brain_ok = st_read_floats(&st, st_find(&st, "b"), 1, 65535, out, &err);
    for (int i = 1; i < 65536; i++) {
        brain_ok &= bf16_from_float(out[i - 1]) == (isnan(out[i - 1]) ? 0x7FFF : i);
    }
    wide_ok = st_read_floats(&st, st_find(&st, "d"), 5, 65531, out, &err);
    for (int i = 5; i < 65536; i++) wide_ok &= out[i - 5] == (float)((i - 30000) / 7.0);
    check(&checks, half_ok, "all 65536 F16 values");
    check(&checks, brain_ok, "all 65536 BF16 values, there and back");
    check(&checks, wide_ok, "F64 is rounded to float");
    st_close(&st);
    bool ok = true;  // rounding: a float between two neighbours goes to the nearer one, a tie to
                     // the even one
    for (uint64_t i = 0; i < 100000; i++) {
        uint32_t bits = (uint32_t)mix(i);
        if (i % 4 == 0) bits = (bits & 0xffff0000) | 0x8000;
        float x = float_from_bits(bits);
        if (!isfinite(x) || (bits & 0x7fffffff) >= 0x7f7f0000) continue;
        double down = bf16_to_float((uint16_t)(bits >> 16)),
               up = bf16_to_float((uint16_t)((bits >> 16) + 1));
        double to_down = fabs(x - down), to_up = fabs(x - up);
        bool take_up = to_up < to_down || (to_up == to_down && (bits >> 16 & 1));
        ok &= bf16_to_float(bf16_from_float(x)) == (float)(take_up ? up : down);
    }
    ok &= isinf(bf16_to_float(bf16_from_float(3.4e38f))) &&
          isnan(bf16_to_float(bf16_from_float(float_from_bits(0x7f800001))));
    check(&checks, ok, "BF16 rounds to nearest even");
    free(out);
}

// ----------------------------------------------------------------------------------------
// Layouts

static const GPTConfig SMALL = {7, 24, 12, 257, 384, 10, NULL};

// Returns the value of an element of the unsharded model: any finite bits; a bf16 model has no
// lower half.
static float element(const Tensor *x, StateKind kind, size_t global, bool bf16) {
    uint32_t bits = (uint32_t)mix(((uint64_t)x->id << 40) + ((uint64_t)kind << 60) + global + 1);
    if ((bits >> 23 & 255) == 255) bits &= 0xbfffffff;
    if (bf16 && kind == STATE_WEIGHTS) bits &= 0xffff0000;
    return float_from_bits(bits);
}

// A rank's flat buffer as the model above has it. outside: the value in gaps and padding.
static float *make_values(const ParamTable *table, StateKind kind, bool bf16, float outside) {
    float *values = allocate((table->total + 1) * sizeof(float));
    for (size_t i = 0; i < table->total; i++) values[i] = outside;
    for (size_t i = 0; i < table->count; i++) {
        const Tensor *x = &table->tensors[i];
        Run run;
        for (size_t r = 0; tensor_run(x, r, 0, x->size, &run); r++) {
            for (size_t j = 0; j < run.count; j++) {
                values[x->offset + run.local + j] = element(x, kind, run.global + j, bf16);
            }
        }
    }
    return values;
}

typedef struct {
    size_t t, p, v, d;
    bool fork;  // a process per rank, all at once
} Layout;

// A rank's part of a model: elements [lo, hi) of its table, in a checkpoint or a file at
// `path`.
typedef struct {
    const ParamTable *table;
    size_t lo, hi;
    bool bf16;
    const char *path;
} Part;

typedef bool (*RankJob)(const Part *p, Error *err);

// Returns the table of tensor rank `tr` of stage `stage`.
static ParamTable rank_table(const GPTConfig *config, const Layout *l, size_t tr, size_t stage) {
    size_t chunks = l->p * l->v, *layers = allocate(config->L * sizeof(size_t)), n = 0;
    for (size_t c = 0; c < l->v; c++) {
        size_t chunk = c * l->p + stage, each = config->L / chunks, more = config->L % chunks;
        size_t first = chunk * each + (chunk < more ? chunk : more);
        for (size_t i = 0; i < each + (chunk < more); i++) layers[n++] = first + i;
    }
    Shard shard;
    memset(&shard, 0, sizeof shard);
    shard.t = l->t;
    shard.t_rank = tr;
    shard.embedding = stage == 0;
    shard.head = stage == l->p - 1;
    shard.n_layers = n;
    shard.layers = layers;
    ParamTable table = table_make(config, shard);
    free(layers);
    return table;
}

// Runs the job of every rank of the layout; data ranks share the flat buffer out as ZeRO does.
static bool each_rank(const GPTConfig *config, const Layout *l, bool bf16, const char *path,
                      RankJob job, Error *err) {
    bool ok = true;
    for (size_t rank = 0; rank < l->t * l->p * l->d; rank++) {
        size_t tr = rank % l->t, dr = rank / l->t % l->d, stage = rank / l->t / l->d;
        pid_t child = l->fork ? fork() : 0;
        if (child) continue;
        ParamTable table = rank_table(config, l, tr, stage);
        Part part = {&table, table.total * dr / l->d, table.total * (dr + 1) / l->d, bf16, path};
        bool done = job(&part, err);
        if (!done) printf("     rank %zu: %s\n", rank, err->text);
        table_free(&table);
        if (l->fork) _exit(!done);
        ok &= done;
    }
    for (int status; l->fork && wait(&status) > 0;) ok &= status == 0;
    return ok;
}

enum { MAX_SUMS = 1024 };
static uint64_t *all_sums;  // [MAX_SUMS] of all ranks, in memory that their processes share

static bool job_write(const Part *p, Error *err) {
    bool ok = true;
    Checksums sums = checksums_make(&p->table->config, p->bf16);
    for (int k = 0; k < (p->bf16 ? 4 : 3) && ok; k++) {
        StateKind kind = (StateKind)k;
        float *values = make_values(p->table, kind, p->bf16, NAN);
        size_t middle = p->lo + (p->hi - p->lo) / 3;  // two slices
        ok = write_range(p->path, kind, p->table, values, p->lo, middle, &sums, err) &&
             write_range(p->path, kind, p->table, values, middle, p->hi, &sums, err);
        free(values);
    }
    for (size_t i = 0; i < sums.count; i++)
        __atomic_fetch_add(&all_sums[i], sums.sums[i], __ATOMIC_SEQ_CST);
    free(sums.sums);
    return ok;
}

static bool read_back(const Part *p, StateKind kind, Error *err) {
    size_t bytes = (p->hi - p->lo) * sizeof(float);
    float *wanted = make_values(p->table, kind, p->bf16, 0.0f),
          *values = allocate(p->table->total * sizeof(float));
    memset(values, 0xff, p->table->total * sizeof(float));
    bool ok = read_range(p->path, kind, p->table, values, p->lo, p->hi, err);
    if (ok && memcmp(values + p->lo, wanted + p->lo, bytes) != 0)
        ok = error_set(err, "other bits were read");
    free(values);
    free(wanted);
    return ok;
}

static bool job_read(const Part *p, Error *err) {
    bool ok = true;
    for (int k = 0; k < (p->bf16 ? 4 : 3) && ok; k++) ok = read_back(p, (StateKind)k, err);
    return ok;
}

static bool job_read_weights(const Part *p, Error *err) { return read_back(p, STATE_WEIGHTS, err); }

static bool job_gradients(const Part *p, Error *err) {
    float *values = make_values(p->table, STATE_WEIGHTS, p->bf16, NAN);
    bool ok = write_range(p->path, STATE_WEIGHTS, p->table, values, p->lo, p->hi, NULL, err);
    free(values);
    return ok;
}

static TrainerState example_state(size_t step) {
    TrainerState s = {.step = step,
                      .sample = step * 8,
                      .first_step = step,
                      .data = "7 x 4000 + 3 x 2000",
                      .opt = {.seed = UINT64_MAX - 1,
                              .shuffle = true,
                              .seq = 64,
                              .global_batch = 8,
                              .steps = 1000,
                              .warmup = 10,
                              .lr_schedule = 1,
                              .lr = 1e-3 / 3,
                              .lr_final = 0.1,
                              .weight_decay = 0.1,
                              .clip = 1.0,
                              .beta1 = 0.9,
                              .beta2 = 0.95,
                              .eps = 1e-8,
                              .ramp = {2, 2, 100},
                              .dropout = 0.1}};
    return s;
}

// Saves a checkpoint of the example model under `out`.
static bool save(const char *out, size_t step, const GPTConfig *config, const Layout *l,
                 bool bf16, Error *err) {
    char tmp[PATH_MAX], dir[PATH_MAX];
    TrainerState state = example_state(step);
    state.bf16 = bf16;
    state.save = checkpoint_next_save(out, 0);
    if (!all_sums) {
        all_sums = mmap(NULL, MAX_SUMS * sizeof *all_sums, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (all_sums == MAP_FAILED) exit(1);
    }
    Checksums sums = checksums_make(config, bf16);
    if (sums.count > MAX_SUMS) exit(1);
    memset(all_sums, 0, MAX_SUMS * sizeof *all_sums);
    bool ok = checkpoint_create(out, &no_lock, step, config, bf16, NULL, tmp, err) &&
              (each_rank(config, l, bf16, tmp, job_write, err) || (checkpoint_remove(tmp), false));
    memcpy(sums.sums, all_sums, sums.count * sizeof *all_sums);
    ok = ok && checkpoint_commit(out, tmp, &state, &sums, dir, err);
    free(sums.sums);
    return ok;
}

static const Layout ONE = {1, 1, 1, 1, false};

// The same of one rank, in fp32.
static bool save_one(const char *out, size_t step, const GPTConfig *config, Error *err) {
    return save(out, step, config, &ONE, false, err);
}

static void test_layouts(void) {
    static const Layout layouts[] = {
        {1, 1, 1, 1, false}, {1, 1, 1, 3, false}, {2, 1, 1, 1, false}, {3, 1, 1, 2, true},
        {4, 1, 1, 1, false}, {1, 2, 1, 1, false}, {1, 3, 2, 2, false}, {2, 2, 1, 2, true},
        {2, 2, 2, 1, false}, {3, 3, 1, 1, false}, {4, 2, 2, 3, true},  {4, 3, 1, 2, false},
        {1, 7, 1, 1, false}, {2, 1, 1, 5, false},
    };
    enum { COUNT = sizeof layouts / sizeof layouts[0] };
    Error err = {""};
    for (int bf16 = 0; bf16 < 2; bf16++) {
        const char *out = in_root(bf16 ? "whole16" : "whole"), *whole = in(out, "step-00000100");
        bool saved = save(out, 100, &SMALL, &ONE, bf16, &err);
        if (!check(&checks, saved, "one rank saves (%s) %s", bf16 ? "bf16" : "fp32", err.text))
            return;
        for (int i = 0; i < COUNT; i++) {
            const Layout *w = &layouts[i], *r = &layouts[(i * 5 + 3) % COUNT];
            const char *dir = in_root("layout/step-00000100");
            checkpoint_remove(dir);  // or its save would be counted
            bool ok = save(in_root("layout"), 100, &SMALL, w, bf16, &err);
            static const char *const names[] = {"config.json", "trainer.json", "model.safetensors",
                                                "optimizer.safetensors"};
            for (int f = 0; f < 4 && ok; f++) {
                ok = same_file(in(whole, names[f]), in(dir, names[f])) ||
                     error_set(&err, "%s differs from the one of one rank", names[f]);
            }
            ok = ok && checkpoint_is_complete(dir, &SMALL, bf16 ? 4 : 3, &err) &&
                 checkpoint_verify(dir, &err) && each_rank(&SMALL, r, bf16, dir, job_read, &err);
            check(&checks, ok,
                  "same topology only: %s saved by t%zu p%zu v%zu d%zu, read by t%zu p%zu v%zu "
                  "d%zu%s%s",
                  bf16 ? "bf16" : "fp32", w->t, w->p, w->v, w->d, r->t, r->p, r->v, r->d,
                  ok ? "" : ": ", ok ? "" : err.text);
        }
    }
    // Rows and tensors much longer than a stage.
    static const GPTConfig wide = {1, 512, 8, 100, 128, 4, NULL};
    static const Layout four = {4, 1, 1, 2, true}, two = {2, 1, 1, 1, false};
    bool ok = save(in_root("wide"), 1, &wide, &four, false, &err) &&
              each_rank(&wide, &two, false, in_root("wide/step-00000001"), job_read, &err);
    check(&checks, ok, "C = 512 saved by t4 d2, read by t2%s%s", ok ? "" : ": ",
          ok ? "" : err.text);
    // The gradient dump walks the same slices.
    const char *path = in_root("gradients.safetensors");
    ok = slices_create(path, GRADIENTS_START, &SMALL, STATE_WEIGHTS, STATE_WEIGHTS, ST_F32, &err) &&
         each_rank(&SMALL, &layouts[10], false, path, job_gradients, &err);
    check(&checks, ok && same_tensors(path, in_root("whole/step-00000100/model.safetensors")),
          "gradients written by t4 p2 v2 d3 are those of one rank");
    path = in_root("no/such/folder");
    ok = !slices_create(path, GRADIENTS_START, &SMALL, STATE_WEIGHTS, STATE_WEIGHTS, ST_F32,
                        &err) &&
         says(&err, "No such file");
    check(&checks, ok, "gradients to a folder that is not there");
}

// ----------------------------------------------------------------------------------------
// Foreign and wrong checkpoints

// Copies model.safetensors of a checkpoint with another header: every `from` becomes `to`,
// `extra` is added in front.
static void rewrite_header(const char *from_dir, const char *to_dir, const char *from,
                           const char *to, const char *extra, size_t extra_bytes) {
    size_t bytes, n;
    uint64_t length;
    char *file = read_file(in(from_dir, "model.safetensors"), &bytes);
    memcpy(&length, file, 8);
    char *header = allocate(length * 4 + strlen(extra) + 8);
    n = (size_t)sprintf(header, "{%s%s", extra, extra[0] ? "," : "");
    for (const char *p = file + 9; p < file + 8 + length;) {
        if (strncmp(p, from, strlen(from)) == 0) {
            n += (size_t)sprintf(header + n, "%s", to);
            p += strlen(from);
        } else {
            header[n++] = *p++;
        }
    }
    size_t count = bytes - 8 - length;
    char *data = allocate(count + extra_bytes);
    memcpy(data, file + 8 + length, count);
    write_safetensors(in(to_dir, "model.safetensors"), header, data, count + extra_bytes);
    free(data);
    free(header);
    free(file);
}

// Further tensors of a file of weights, allowed or refused: each with its bytes behind the
// others.
typedef struct {
    const char *what, *name, *dtype, *shape;
    size_t bytes;
    char fill;         // all bytes; 'e': the embedding's
    const char *says;  // NULL: the file is read
} ExtraCase;

static const ExtraCase EXTRAS[] = {
    {"a mask", "transformer.h.0.attn.bias", "BOOL", "[1,1,10,10]", 100, 1, NULL},
    {"a mask of F32", "h.0.attn.bias", "F32", "[1,1,10,10]", 400, 1, NULL},
    {"a scalar for masked scores", "transformer.h.0.attn.masked_bias", "F32", "[]", 4, 1, NULL},
    {"the angles of RoPE", "model.layers.0.self_attn.rotary_emb.inv_freq", "F32", "[4]", 16, 1,
     NULL},
    {"a head that is the embedding", "lm_head.weight", "F32", "[257,24]", 24672, 'e', NULL},
    {"a head of its own", "lm_head.weight", "F32", "[257,24]", 24672, 1,
     "lm_head.weight differs from wte.weight"},
    {"a head of another size", "lm_head.weight", "F32", "[256,24]", 24576, 1,
     "lm_head.weight differs from wte.weight"},
    {"a head of F8", "lm_head.weight", "F8_E8M0", "[257,24]", 6168, 1,
     "lm_head.weight differs from wte.weight"},
    {"a bias that GPT-2 lacks", "h.0.attn.q_norm.weight", "F32", "[24]", 96, 1,
     "has a tensor h.0.attn.q_norm.weight"},
    {"a tensor of one layer more", "h.7.ln_1.weight", "F32", "[24]", 96, 1,
     "has a tensor h.7.ln_1.weight"},
    {"a weight twice", "transformer.wpe.weight", "F32", "[10,24]", 960, 1,
     "has a tensor transformer.wpe.weight"},
    {"a head for classes", "score.weight", "F6_E2M3", "[2,24]", 36, 1,
     "has a tensor score.weight"},
    {"a bias that only ends like a mask", "h.0.self_attn.bias", "F32", "[24]", 96, 1,
     "h.0.self_attn.bias"},
};

static void test_extra(void) {
    Error err;
    const char *dir = in_root("extra"), *whole = in_root("whole/step-00000100");
    size_t data = 4 * count_parameters(&SMALL);
    ParamTable table = table_make(&SMALL, shard_whole(&SMALL));
    float *embedding = make_values(&table, STATE_WEIGHTS, false, 0.0f);
    mkdir(dir, 0777);
    for (size_t i = 0; i < sizeof EXTRAS / sizeof EXTRAS[0]; i++) {
        const ExtraCase *c = &EXTRAS[i];
        char extra[256];
        snprintf(extra, sizeof extra,
                 "\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}", c->name,
                 c->dtype, c->shape, data, data + c->bytes);
        rewrite_header(whole, dir, "\"h.8.", "\"h.8.", extra, c->bytes);
        size_t bytes;
        const char *path = in(dir, "model.safetensors");
        char *file = read_file(path, &bytes);
        memset(file + bytes - c->bytes, c->fill, c->bytes);
        if (c->fill == 'e') memcpy(file + bytes - c->bytes, embedding, c->bytes);
        write_file(path, file, bytes);
        free(file);
        bool read = checkpoint_is_complete(dir, &SMALL, 1, &err);
        check(&checks, read == !c->says && (read || says(&err, c->says)),
              "beside the weights: %s%s%s", c->what, read ? "" : " -> ", read ? "" : err.text);
    }
    free(embedding);
    table_free(&table);
}

static void test_foreign(void) {
    Error err;
    const char *dir = in_root("foreign"), *whole = in_root("whole/step-00000100");
    mkdir(dir, 0777);
    rewrite_header(whole, dir, "\"h.", "\"transformer.h.", "", 0);
    bool ok = checkpoint_is_complete(dir, &SMALL, 1, &err);
    if (!ok) printf("     %s\n", err.text);
    ok = ok && each_rank(&SMALL, &ONE, false, dir, job_read_weights, &err);
    check(&checks, ok, "names with the prefix \"transformer.\"");
    rewrite_header(whole, dir, "\"wte.weight", "\"lm_head.weight", "", 0);
    ok = checkpoint_is_complete(dir, &SMALL, 1, &err) &&
         each_rank(&SMALL, &ONE, false, dir, job_read_weights, &err);
    check(&checks, ok, "a tied embedding by the name of the head %s", ok ? "" : err.text);
    static const struct { const char *what, *from, *to, *says;
    } wrong[] = {
        {"a tensor is missing", "\"ln_f.bias\"", "\"ln_g.bias\"", "has no tensor ln_f.bias"},
        {"another shape of the same size", "[24,96]", "[96,24]", "instead of [24,96]"},
        {"another number of dimensions", "\"shape\":[24,72]", "\"shape\":[1728]",
         "has shape [1728] instead of [24,72]"},
        {"integers", "\"F32\",\"shape\":[10,24]", "\"I32\",\"shape\":[10,24]",
         "tensor wpe.weight is I32"},
        {"a type of later files", "\"F32\",\"shape\":[10,24]", "\"F4\",\"shape\":[10,24]",
         "tensor wpe.weight is of an unknown dtype"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        rewrite_header(whole, dir, wrong[i].from, wrong[i].to, "", 0);
        ok = !checkpoint_is_complete(dir, &SMALL, 1, &err) && says(&err, wrong[i].says);
        check(&checks, ok, "weights: %s", wrong[i].what);
    }
    unlink(in_root("foreign/model.safetensors"));
    ok = !checkpoint_is_complete(dir, &SMALL, 1, &err) && says(&err, "No such file");
    ok &= !checkpoint_is_complete(whole, &SMALL, 4, &err) &&
          says(&err, "has no tensor wte.weight.master");
    GPTConfig longer = SMALL;
    longer.maxT = 11;
    ok &= !checkpoint_is_complete(whole, &longer, 3, &err) &&
          says(&err, "wpe.weight has shape [10,24] instead of [11,24]");
    check(&checks, ok, "missing weights, missing master weights, another model");
}

// Writes a copy of the weights in two files, with an index that has each tensor's file.
static void write_split(const char *whole, const char *dir, const char *from, const char *to) {
    SafeTensors st;
    Error err;
    char text[16384], path[64], header[16384], data[1 << 18];
    size_t n =
        (size_t)snprintf(text, sizeof text, "{\"metadata\":{\"total_size\":1},\"weight_map\":{");
    bool ok = st_open(&st, in(whole, "model.safetensors"), O_RDONLY, &err);
    for (size_t k = 0; k < 2 && ok; k++) {
        size_t bytes = 0, length = (size_t)snprintf(header, sizeof header, "%s", ST_START);
        for (size_t i = k; i < st.count && ok; i += 2) {
            const STEntry *x = &st.entries[i];
            length += (size_t)snprintf(
                header + length, sizeof header - length,
                ",\"%s\":{\"dtype\":\"F32\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}", x->name,
                x->shape, bytes, bytes + 4 * x->count);
            n += (size_t)snprintf(text + n, sizeof text - n,
                                  "%s\"%s\":\"model-%05zu-of-00002.safetensors\"",
                                  n > 50 ? "," : "", x->name, k + 1);
            ok = bytes + 4 * x->count <= sizeof data &&
                 st_read(&st, x, 0, x->count, data + bytes, &err);
            bytes += 4 * x->count;
        }
        snprintf(header + length, sizeof header - length, "}");
        snprintf(path, sizeof path, "model-%05zu-of-00002.safetensors", k + 1);
        write_safetensors(in(dir, path), header, data, bytes);
    }
    if (!ok) fprintf(stderr, "cannot split %s: %s\n", whole, err.text), exit(1);
    st_close(&st);
    snprintf(text + n, sizeof text - n, "}}");
    char *changed = replaced(text, from ? from : "", from ? to : "");
    write_text(in(dir, "model.safetensors.index.json"), changed);
    free(changed);
}

// Tests weights in several files, as Hugging Face saves large models. The values are the same.
// An index with a wrong file is refused by name.
static void test_split(void) {
    Error err = {""};
    const char *dir = in_root("split"), *whole = in_root("whole/step-00000100");
    mkdir(dir, 0777);
    write_split(whole, dir, NULL, NULL);
    bool ok = checkpoint_is_complete(dir, &SMALL, 1, &err);
    if (!ok) printf("     %s\n", err.text);
    ok = ok && each_rank(&SMALL, &ONE, false, dir, job_read_weights, &err);
    check(&checks, ok, "weights in two files with an index");
    static const struct { const char *from, *to, *says;
    } LIES[] = {
        {"\"h.0.attn.c_attn.bias\":\"model-00001", "\"h.0.attn.c_attn.bias\":\"model-00002",
         "h.0.attn.c_attn.bias"},
        {"\"h.0.attn.c_attn.bias\"", "\"h.9.attn.c_attn.bias\"",
         "puts tensor h.9.attn.c_attn.bias into"},
        {"\"h.0.attn.c_attn.bias\":\"model-00001-of-00002.safetensors\",", "",
         "it lists 87 tensors, and its files have 88"},
        {"model-00002-of", "model-00003-of",
         "model-00003-of-00002.safetensors, which is not there"},
        {"_map\":{", "_map\":{\"extra\":\"model-00001-of-00002.safetensors\",",
         "puts tensor extra into"},
        {"_map\":{", "_map\":{\"wpe.weight\":\"model-00002-of-00002.safetensors\",",
         "has \"wpe.weight\" twice"},
        {"\"model-00001-of", "\"../model-00001-of", "entry 0 of its \"weight_map\""},
        {"weight_map", "weight_mop", "has no \"weight_map\""},
        {"\"weight_map\":{", "\"weight_map\":{\"x\":3,", "entry 0 of its \"weight_map\""},
        {"}}", "}", "is not valid JSON"},
    };
    for (size_t i = 0; i < sizeof LIES / sizeof LIES[0]; i++) {
        write_split(whole, dir, LIES[i].from, LIES[i].to);
        bool refused = !checkpoint_is_complete(dir, &SMALL, 1, &err);
        check(&checks,
              refused && says(&err, LIES[i].says) && says(&err, "model.safetensors.index.json"),
              "refused: an index that lies -> %s", err.text);
    }
}

#define SIZES "\"n_layer\":2,\"n_head\":4,\"n_embd\":32,\"n_positions\":24,\"vocab_size\":61"
#define GPT2(members) "{\"model_type\":\"gpt2\"," members "}"
#define GPT2_DEFAULTS                                                                            \
    "\"_name_or_path\":\"\",\"activation_function\":\"gelu_new\",\"add_cross_attention\":false," \
    "\"architectures\":null,"                                                                    \
    "\"attn_pdrop\":0.1,\"bad_words_ids\":null,\"begin_suppress_tokens\":null,\"bos_token_id\":" \
    "50256,"                                                                                     \
    "\"chunk_size_feed_forward\":0,\"cross_attention_hidden_size\":null,\"decoder_start_token_"  \
    "id\":null,"                                                                                 \
    "\"diversity_penalty\":0.0,\"do_sample\":false,\"dtype\":null,\"early_stopping\":false,"     \
    "\"embd_pdrop\":0.1,"                                                                        \
    "\"encoder_no_repeat_ngram_size\":0,\"eos_token_id\":50256,\"exponential_decay_length_"      \
    "penalty\":null,"                                                                            \
    "\"finetuning_task\":null,\"forced_bos_token_id\":null,\"forced_eos_token_id\":null,"        \
    "\"id2label\":{\"0\":\"A\"},"                                                                \
    "\"initializer_range\":0.02,\"is_decoder\":false,\"is_encoder_decoder\":false,\"label2id\":" \
    "{\"A\":0},"                                                                                 \
    "\"layer_norm_epsilon\":1e-05,\"length_penalty\":1.0,\"max_length\":20,\"min_length\":0,"    \
    "\"n_inner\":null,"                                                                          \
    "\"no_repeat_ngram_size\":0,\"num_beam_groups\":1,\"num_beams\":1,\"num_return_sequences\":" \
    "1,"                                                                                         \
    "\"output_attentions\":false,\"output_hidden_states\":false,\"output_scores\":false,\"pad_"  \
    "token_id\":null,"                                                                           \
    "\"prefix\":null,\"problem_type\":null,\"pruned_heads\":{},\"remove_invalid_values\":false," \
    "\"reorder_and_upcast_attn\":false,\"repetition_penalty\":1.0,\"resid_pdrop\":0.1,\"return_" \
    "dict\":true,"                                                                               \
    "\"return_dict_in_generate\":false,\"scale_attn_by_inverse_layer_idx\":false,\"scale_attn_"  \
    "weights\":true,"                                                                            \
    "\"sep_token_id\":null,\"summary_activation\":null,\"summary_first_dropout\":0.1,"           \
    "\"summary_proj_to_labels\":true,\"summary_type\":\"cls_index\",\"summary_use_proj\":true,"  \
    "\"suppress_tokens\":null,\"task_specific_params\":{\"text-generation\":{\"max_length\":50}" \
    "},"                                                                                         \
    "\"temperature\":1.0,\"tf_legacy_loss\":false,\"tie_encoder_decoder\":false,\"tie_word_"     \
    "embeddings\":true,"                                                                         \
    "\"tokenizer_class\":null,\"top_k\":50,\"top_p\":1.0,\"torchscript\":false,"                 \
    "\"transformers_version\":\"4.57.6\",\"typical_p\":1.0,\"use_bfloat16\":false,\"use_"        \
    "cache\":true"
static void test_config(void) {
    static const struct { const char *what, *text, *says;
    } cases[] = {
        {"the least that is needed", GPT2(SIZES), NULL},
        {"all defaults written out",
         GPT2(
             SIZES
             ",\"activation_function\":\"gelu_new\",\"n_inner\":128,\"layer_norm_epsilon\":1e-05,"
             "\"tie_word_embeddings\":true,\"scale_attn_weights\":true,"
             "\"scale_attn_by_inverse_layer_idx\":false,\"reorder_and_upcast_attn\":false,\"attn_"
             "pdrop\":0.1"),
         NULL},
        {"newer names that agree",
         GPT2(SIZES ",\"hidden_size\":32,\"num_hidden_layers\":2,\"num_attention_heads\":4,"
                    "\"max_position_embeddings\":24,\"n_ctx\":24,\"n_inner\":null"),
         NULL},
        {"all that transformers 5.24 and 4.57 write", GPT2(SIZES "," GPT2_DEFAULTS), NULL},
        {"two widths", GPT2(SIZES ",\"hidden_size\":64"),
         "\"n_embd\" and \"hidden_size\" disagree"},
        {"two depths", GPT2(SIZES ",\"num_hidden_layers\":3"),
         "\"n_layer\" and \"num_hidden_layers\" disagree"},
        {"two counts of heads", GPT2(SIZES ",\"num_attention_heads\":8"),
         "\"num_attention_heads\" disagree"},
        {"two lengths", GPT2(SIZES ",\"n_ctx\":1024"), "\"n_positions\" and \"n_ctx\" disagree"},
        {"two types", GPT2(SIZES ",\"dtype\":\"float16\",\"torch_dtype\":\"float32\""),
         "\"torch_dtype\" disagree"},
        {"RoPE", GPT2(SIZES ",\"rope_theta\":10000.0"), "\"rope_theta\" is not supported"},
        {"a member that nobody knows", GPT2(SIZES ",\"logit_scale\":0.5"),
         "\"logit_scale\" is not supported"},
        {"a member that is null", GPT2(SIZES ",\"logit_scale\":null"), NULL},
        {"cross attention", GPT2(SIZES ",\"add_cross_attention\":true"),
         "\"add_cross_attention\" must be false"},
        {"heads that were cut out", GPT2(SIZES ",\"pruned_heads\":{\"0\":[1]}"),
         "\"pruned_heads\" must be {}"},
        {"another architecture", "{\"model_type\":\"llama\"," SIZES "}", "model_type"},
        {"no model_type", "{" SIZES "}", "model_type"},
        {"model_type is a number", "{\"model_type\":2," SIZES "}", "model_type"},
        {"ReLU", GPT2(SIZES ",\"activation_function\":\"relu\""), "gelu_new"},
        {"another epsilon", GPT2(SIZES ",\"layer_norm_epsilon\":1e-6"), "layer_norm_epsilon"},
        {"an untied head", GPT2(SIZES ",\"tie_word_embeddings\":false"), "tie_word_embeddings"},
        {"attention scaled by layer", GPT2(SIZES ",\"scale_attn_by_inverse_layer_idx\":true"),
         "scale_attn"},
        {"unscaled attention", GPT2(SIZES ",\"scale_attn_weights\":false"), "scale_attn_weights"},
        {"another inner size", GPT2(SIZES ",\"n_inner\":64"), "n_inner"},
        {"a size twice", GPT2(SIZES ",\"n_embd\":64"), "twice"},
        {"a size is missing", GPT2("\"n_layer\":2,\"n_embd\":32"), "n_head"},
        {"heads that do not divide",
         GPT2("\"n_layer\":2,\"n_head\":5,\"n_embd\":32,\"n_positions\":24,\"vocab_size\":61"),
         "n_head 5 does not divide n_embd 32"},
        {"no heads",
         GPT2("\"n_layer\":2,\"n_head\":0,\"n_embd\":32,\"n_positions\":24,\"vocab_size\":61"),
         "n_head"},
        {"an absurd size", GPT2("\"n_layer\":1e15,\"n_head\":4,\"n_embd\":32"), "n_layer"},
        {"a fractional size", GPT2("\"n_layer\":2.5,\"n_head\":4,\"n_embd\":32"), "n_layer"},
        {"NaN", GPT2("\"n_embd\":NaN"), "not valid JSON"},
        {"an empty file", "", "not valid JSON"},
    };
    Error err;
    GPTConfig g;
    const char *dir = in_root("config"), *path = in_root("config/config.json");
    mkdir(dir, 0777);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_text(path, cases[i].text);
        bool read = config_read(dir, NULL, &g, &err);
        bool ok = read == !cases[i].says && (read || says(&err, cases[i].says));
        if (read)
            ok &= g.L == 2 && g.NH == 4 && g.C == 32 && g.maxT == 24 && g.V == 61 && g.Vp == 128;
        check(&checks, ok, "config.json: %s", cases[i].what);
    }
    bool ok = config_write(path, &SMALL, true, &err) && config_read(dir, NULL, &g, &err);
    check(&checks, ok && memcmp(&g, &SMALL, sizeof g) == 0,
          "config.json: what is written is read back");
    size_t bytes;
    free(read_file(path, &bytes));
    for (size_t n = bytes - 1; n-- > 0;) {  // the last byte is a newline
        ok &= truncate(path, (off_t)n) == 0 && !config_read(dir, NULL, &g, &err);
    }
    check(&checks,
          ok && !config_read(in_root("nowhere"), NULL, &g, &err) && says(&err, "No such file"),
          "config.json: each truncation is refused");
}

// The members and files that a folder brought and training does not change come
// out again.
static void test_kept(void) {
    static const char source[] =
        "{\n    \"architectures\" : [ \"GPT2Model\" ],\"model_type\":\"gpt2\"," SIZES
        ",\n"
        "    \"bos_token_id\": 0, \"eos_token_id\": [0, 60], \"pad_token_id\": 3, "
        "\"resid_pdrop\": 0.10,\n"
        "    \"task_specific_params\": {\"torch_dtype\": \"}\\\"{\", \"a\": [1.0, {\"x\": "
        "2e0}]}, \"dty\\u0070e\": \"float16\"\t}\n";
    Error err = {""};
    GPTConfig g = {2, 32, 4, 61, 128, 24, NULL}, read;
    Kept kept;
    char tmp[PATH_MAX], name[32];
    const char *dir = in_root("brought"), *out = in_root("kept");
    mkdir(dir, 0777);
    write_text(in(dir, "config.json"), source);
    for (int i = 0; i < KEPT_COUNT; i++) {
        snprintf(name, sizeof name, "%d\n%cfile", i, 0);
        if (i != 2) write_file(in(dir, CHECKPOINT_FILES[KEPT_FIRST + i]), name, 8);
    }
    bool ok = kept_read(&kept, dir, &err) && !kept.files[2] && folder_make(out, &err);
    remove_tree(dir);  // as a resume may do with the checkpoint that it began with
    for (int bf16 = 0; bf16 < 2; bf16++) {
        ok = ok && checkpoint_create(out, &no_lock, 1, &g, bf16, &kept, tmp, &err);
        char *want = replaced(source, "[ \"GPT2Model\" ]", "[\"GPT2LMHeadModel\"]"), *got = NULL;
        char *typed = replaced(want, "\"float16\"", bf16 ? "\"bfloat16\"" : "\"float32\"");
        ok = ok && (got = read_file(in(tmp, "config.json"), NULL)) != NULL &&
             strcmp(got, typed) == 0;
        check(&checks, ok && config_read(tmp, NULL, &read, &err),
              "config.json comes out as it was but for class and type %s", got ? got : err.text);
        for (int i = 0; i < KEPT_COUNT && ok; i++) {
            size_t bytes = 0;
            const char *file = in(tmp, CHECKPOINT_FILES[KEPT_FIRST + i]);
            snprintf(name, sizeof name, "%d\n%cfile", i, 0);
            if (i == 2) {
                ok = !file_exists(file);
            } else {
                char *text = read_file(file, &bytes);
                ok = text && bytes == 8 && memcmp(text, name, 8) == 0;
                free(text);
            }
        }
        check(&checks, ok, "and the files beside it as they were");
        checkpoint_remove(tmp);
        check(&checks, ok && count_entries(out) == 0, "which all belong to the checkpoint");
        free(want), free(typed), free(got);
    }
    kept_free(&kept);
    // Members that the source does not have.
    static const struct { const char *text, *key, *value, *want; } MEMBERS[] = {
        {"{}", "a", "1", "{\n  \"a\": 1\n}"},
        {" { } ", "a", "1", " {\n  \"a\": 1\n} "},
        {"{\"b\":{\"a\":2}}\n", "a", "[1]", "{\"b\":{\"a\":2},\n  \"a\": [1]\n}\n"},
        {"{\"a\":\",}\",\"b\":3}", "a", "1", "{\"a\":1,\"b\":3}"},
        {"{\"a b\":3 , \"a\" : [1,{\"a\":\"]\"}] }", "a", "1", "{\"a b\":3 , \"a\" : 1 }"},
        {"{\n  \"b\": \"a\"\n}", "a", "1", "{\n  \"b\": \"a\",\n  \"a\": 1\n}"},
    };
    for (size_t i = 0; i < sizeof MEMBERS / sizeof MEMBERS[0]; i++) {
        char *made = json_set_member(strdup(MEMBERS[i].text), MEMBERS[i].key, MEMBERS[i].value);
        check(&checks, strcmp(made, MEMBERS[i].want) == 0, "\"%s\" set in %s", MEMBERS[i].key,
              MEMBERS[i].text);
        free(made);
    }
    // Files that cannot be kept are left out: training does not need them.
    const char *odd = in_root("odd");
    mkdir(odd, 0777);
    write_text(in(odd, "config.json"), source);
    ok = symlink("nowhere", in(odd, "tokenizer.json")) == 0 &&
         mkdir(in(odd, "vocab.json"), 0777) == 0;
    write_text(in(odd, "merges.txt"), "x");
    ok = ok && truncate(in(odd, "merges.txt"), KEPT_MOST_BYTES + 1) == 0 &&
         kept_read(&kept, odd, &err);
    for (int i = 0; i < KEPT_COUNT; i++) ok = ok && !kept.files[i];
    check(&checks, ok,
          "a dangling link, a folder and a file that is too large are left out with a note");
    kept_free(&kept);
}

static void test_reals(void) {
    static const struct { double x; const char *text;
    } REALS[] = {
        {8, "8.0"},
        {1e-6, "1e-06"},
        {1e-5, "1e-05"},
        {0.0001, "0.0001"},
        {0.5, "0.5"},
        {5e5, "500000.0"},
        {0.041666666666666664, "0.041666666666666664"},
        {1e16, "1e+16"},
        {123456789012345680.0, "1.2345678901234568e+17"},
        {0.1, "0.1"},
        {1.0 / 3, "0.3333333333333333"},
        {1e11, "100000000000.0"},
        {12345.678, "12345.678"},
        {0, "0.0"},
    };
    char text[40];
    bool ok = true;
    for (size_t i = 0; i < sizeof REALS / sizeof REALS[0]; i++) {
        if (strcmp(json_print_real(text, REALS[i].x), REALS[i].text) == 0) continue;
        printf("     %s instead of %s\n", text, REALS[i].text);
        ok = false;
    }
    for (uint64_t i = 0; i < 10000; i++) {
        double x = ldexp((double)(mix(i) >> 11), (int)(mix(i + 9) % 150) - 100);
        ok = ok && strtod(json_print_real(text, x), NULL) == x && strpbrk(text, ".e");
    }
    check(&checks, ok, "floats are printed as Python prints them, and come back");
}

static void test_state(void) {
    Error err;
    const char *dir = in_root("state"), *path = in(dir, "trainer.json");
    mkdir(dir, 0777);
    bool ok = true;
    for (uint64_t i = 0; i < 200; i++) {
        TrainerState a = example_state(i), b;
        memset(&b, 0, sizeof b);
        a.opt.seed = i == 0 ? UINT64_MAX : mix(i);
        a.sample = (size_t)(mix(i + 1000) >> 11);
        a.opt.shuffle = i % 2;
        a.save = i;
        a.validated = 2 * i, a.sampled = 3 * i;
        double *fields[] = {&a.opt.lr,   &a.opt.lr_final, &a.opt.weight_decay, &a.opt.clip,
                            &a.opt.beta1, &a.opt.beta2,    &a.opt.eps};
        for (int k = 0; k < 7; k++) {
            *fields[k] = ldexp((double)(mix(i * 7 + (uint64_t)k) >> 11), -60 - (int)i / 5);
        }
        ok &= trainer_state_write(path, &a, NULL, &err) && trainer_state_read(dir, &b, &err);
        ok &= a.step == b.step && a.sample == b.sample && b.first_step == b.step &&
              a.bf16 == b.bf16;
        ok &= a.save == b.save && a.validated == b.validated && a.sampled == b.sampled;
        ok &= strcmp(a.data, b.data) == 0 && memcmp(&a.opt, &b.opt, sizeof a.opt) == 0;
    }
    check(&checks, ok, "trainer.json: 200 states come back bit for bit");
    size_t bytes;
    char *text = read_file(path, &bytes);
    TrainerState s;
    ok = true;
    for (size_t n = bytes - 1; n-- > 0;) {
        ok &= truncate(path, (off_t)n) == 0 && !trainer_state_read(dir, &s, &err);
    }
    check(&checks, ok, "trainer.json: each truncation is refused");
    static const struct { const char *from, *to, *says; } wrong[] = {
        {"\"version\": 1", "\"version\": 2", "version 1"},
        {"\"seq\": 64", "\"seq\": \"64\"", "\"seq\" is malformed"},
        {"\"seq\": 64", "\"seq\": -64", "\"seq\" is malformed"},
        {"\"seq\": 64,", "", "\"seq\" is missing"},
        {"\"ramp_start\": 2,", "", "\"ramp_start\" is missing"},
        {"\"seq\": 64", "\"seq\": 64, \"seq\": 65", "\"seq\" twice"},
        {"\"seed\": \"", "\"seed\": \"9999999999999999999999", "\"seed\" is malformed"},
        {"\"clip\": ", "\"clip\": 1e999, \"clap\": ", "\"clip\" is malformed"},
        {"\"7 x 4000", "\"7 x 4000\\u000a", "\"data\" is malformed"},
        {"\"7 x 4000 + 3 x 2000\"", "7", "\"data\" is malformed"},
    };
    ok = true;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char *changed = replaced(text, wrong[i].from, wrong[i].to);
        write_text(path, changed);
        ok &= !trainer_state_read(dir, &s, &err) && says(&err, wrong[i].says);
        free(changed);
    }
    char *older = replaced(text, "\"validated\":", "\"invalidated\":");
    write_text(path, older);
    bool late = trainer_state_read(dir, &s, &err) && s.validated == 0 && s.sampled == 3 * 199;
    check(&checks, late,
          "trainer.json: the step of the last validation is 0 in files of older builds, which "
          "lack it");
    free(older);
    check(&checks, ok, "trainer.json: wrong version, missing, malformed and repeated members");
    TrainerState of_lesson = example_state(5);
    snprintf(of_lesson.lesson, sizeof of_lesson.lesson, "capacity = 4, z-loss = 0.01");
    ok = trainer_state_write(path, &of_lesson, NULL, &err) && trainer_state_read(dir, &s, &err) &&
         strcmp(s.lesson, of_lesson.lesson) == 0;
    older = replaced(text, ",\n  \"lesson\": \"\"", "");
    write_text(path, older);
    ok = ok && strstr(text, "\"lesson\"") && !strstr(older, "lesson") &&
         trainer_state_read(dir, &s, &err) && !s.lesson[0];
    free(older);
    free(text);
    check(&checks, ok,
          "trainer.json: a lesson's options come back, and an older file without them is read");
    char *notes;
    FILE *out = open_memstream(&notes, &bytes);
    TrainerState a = example_state(5), b = example_state(9);
    ok = out && trainer_state_compare(&a, &b, out, &err) && fflush(out) == 0 && bytes == 0;
    b.opt.lr = 0.5;
    b.opt.global_batch = 16;
    strcpy(a.lesson, "capacity = 4, balance-loss = 0.1, z-loss = 0.01");
    strcpy(b.lesson, "capacity = 0.5, balance-loss = 0.1, z-loss = 0");
    ok &= trainer_state_compare(&a, &b, out, &err);
    b.opt.seq = 128;
    ok &= !trainer_state_compare(&a, &b, out, &err) && says(&err, "seq = 64, this run has 128");
    fclose(out);
    ok &= strstr(notes, "with global_batch = 8, this run has 16\n") &&
          strstr(notes, "with lr = 0.000") != NULL;
    ok &= strstr(notes, "with capacity = 4, this run has 0.5\n") &&
          strstr(notes, "with z-loss = 0.01, this run has 0\n");
    ok &= strstr(notes, "balance-loss") == NULL;
    free(notes);
    check(&checks, ok, "a run that resumes with other options is told, with another seq refused");
    static DataLoader data = {
        .source_count = 2,
        .sources = {{.weight = 1, .samples = 500}, {.weight = 1, .samples = 500}}};
    static const char older_blend[] = "1 x 500 + 1 x 500";
    strcpy(a.data, older_blend);
    a.opt.shuffle = true;
    ok = !progress_data(&a, &data, false, &err) &&
         says(&err, "than --train-data names (1 x 500 + 1 x 500, each in an order");
    a.opt.shuffle = false;
    ok &= progress_data(&a, &data, false, &err) && strcmp(a.data, older_blend) == 0;
    a.opt.shuffle = true;
    ok &= progress_data(&a, &data, true, &err) && progress_data(&a, &data, false, &err);
    check(&checks, ok,
          "a blend that was shuffled in one order for all its sets is refused, or taken with "
          "--verify 0");
}

// ----------------------------------------------------------------------------------------
// Interruptions and full disks

static size_t count_entries(const char *dir) {
    size_t n = 0;
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));) n += e->d_name[0] != '.';
    if (d) closedir(d);
    return n;
}

// Returns true if `name` is the newest checkpoint. verify: only those with right
// checksums count.
static bool newest_is(const char *out, bool verify, const char *name) {
    char path[PATH_MAX];
    Error err;
    if (!latest_sound(out, verify, path, &err)) return false;
    const char *slash = strrchr(path, '/');
    return strcmp(slash ? slash + 1 : path, name) == 0;
}

static bool latest_is(const char *out, const char *name) { return newest_is(out, true, name); }

static void test_folders(void) {
    Error err;
    char tmp[PATH_MAX];
    const char *out = in_root("a/b/out"), *step_10 = in(out, "step-00000010"),
               *step_20 = in(out, "step-00000020");
    bool ok = latest_is(out, "");
    check(&checks, ok, "no folder yet: no checkpoint, and no error");
    ok = save_one(out, 5, &SMALL, &err) && save_one(out, 10, &SMALL, &err);
    check(&checks, ok && latest_is(out, "step-00000010"), "the newest checkpoint is found");
    ok = checkpoint_create(out, &no_lock, 15, &SMALL, false, NULL, tmp, &err) &&
         latest_is(out, "step-00000010");
    ok = ok && save_one(out, 20, &SMALL, &err) && count_entries(out) == 4;
    mkdir(in(out, "step-00000099"), 0777);  // somebody's empty folder
    mkdir(in(out, "step-mine"), 0777);
    mkdir(in(out, "tmp-mine"), 0777);
    check(&checks, ok && latest_is(out, "step-00000020"),
          "an interrupted save and foreign folders do not count");
    checkpoint_prune(out, 0, 20);
    ok = count_entries(out) == 7 && checkpoint_claim(out, true, &lock, &err);
    ok = ok && !file_exists(tmp) && count_entries(out) == 6;
    check(&checks, ok, "a new run clears an interrupted save away");
    rmdir(in(out, "step-00000099"));
    checkpoint_prune(out, 2, 20);
    ok = !file_exists(in(out, "step-00000005")) && file_exists(step_10);
    checkpoint_prune(out, 1, 10);
    ok &= file_exists(step_10) && file_exists(step_20);
    checkpoint_prune(out, 1, 20);
    ok &= !file_exists(step_10) && count_entries(out) == 3;
    check(&checks, ok, "pruning keeps the newest, later ones and what is not ours");
    ok = save(out, 20, &SMALL, &ONE, true, &err) && count_entries(out) == 3 &&
         checkpoint_is_complete(step_20, &SMALL, 4, &err);
    check(&checks, ok, "the same step saved again replaces the old one");
    ok = save_one(out, 30, &SMALL, &err) && save_one(out, 25, &SMALL, &err);
    check(&checks, ok && latest_is(out, "step-00000025"),
          "the newest checkpoint is the one that was saved last, though an earlier run came "
          "further");
    ok = rename(in(out, "step-00000030"), in(out, "tmp-00000030-node-7")) == 0 &&
         checkpoint_claim(out, true, &lock, &err) && file_exists(in(out, "step-00000030"));
    check(&checks, ok, "a checkpoint that lacked but its name gets it from the next run");
    write_file(in_root("file"), "x", 1);
    ok = !checkpoint_claim(in_root("file"), true, &lock, &err) && says(&err, "not a folder");
    ok &= !checkpoint_claim(in_root("file/out"), true, &lock, &err) &&
          says(&err, "Not a directory");
    ok &= !checkpoint_claim("/proc/out", true, &lock, &err) && says(&err, "/proc/out");
    ok &= !checkpoint_claim("", true, &lock, &err) && says(&err, "");
    ok &= checkpoint_claim(in_root("a/b/new/"), true, &lock, &err) &&
          count_entries(in_root("a/b/new")) == 0;
    ok &= !checkpoint_create(in_root("file/out"), &no_lock, 1, &SMALL, false, NULL, tmp, &err) &&
          says(&err, "Not a directory");
    check(&checks, ok, "unwritable --out");
}

static const GPTConfig TINY = {1, 8, 2, 20, 128, 4, NULL};

static bool set_time(const char *path, time_t seconds) {
    struct timespec times[2] = {{seconds, 0}, {seconds, 0}};
    return utimensat(AT_FDCWD, path, times, 0) == 0;
}

// Checkpoints are ordered by their saves, whatever the times of the files are.
static void test_order(void) {
    enum { IN_2033 = 2000000000 };
    Error err = {""};
    const char *out = in_root("order");
    bool ok = save_one(out, 10, &TINY, &err) && set_time(in(out, "step-00000010/trainer.json"), 0);
    check(&checks, ok && latest_is(out, "step-00000010"),
          "a checkpoint of the year 1970 is one %s", err.text);
    ok = set_time(in(out, "step-00000010/trainer.json"), IN_2033) && save_one(out, 20, &TINY, &err);
    checkpoint_prune(out, 1, 20);
    check(&checks, ok && latest_is(out, "step-00000020") && count_entries(out) == 1,
          "a clock that was ahead: the next save stays, and the older checkpoint goes %s",
          err.text);
    ok = set_time(in(out, "step-00000020/trainer.json"), IN_2033) &&
         save_one(out, 15, &TINY, &err) && save_one(out, 12, &TINY, &err);
    check(&checks, ok && latest_is(out, "step-00000012"),
          "and of a run that went back, the last save %s", err.text);
    ok = truncate(in(out, "step-00000015/trainer.json"), 0) == 0 &&
         checkpoint_next_save(out, 0) == 5 && checkpoint_next_save(out, 7) == 8 &&
         save_one(out, 16, &TINY, &err);
    checkpoint_prune(out, 2, 16);
    check(&checks, ok && latest_is(out, "step-00000016") && count_entries(out) == 4,
          "a trainer.json that cannot be read takes no other checkpoint's place %s", err.text);
    TrainerState later = example_state(40), earlier = example_state(30), edited = example_state(30);
    const char *equal = in_root("equal");
    ok = save_one(equal, 40, &TINY, &err) && save_one(equal, 30, &TINY, &err) &&
         trainer_state_write(in(equal, "step-00000040/trainer.json"), &later, NULL, &err) &&
         trainer_state_write(in(equal, "step-00000030/trainer.json"), &earlier, NULL, &err);
    check(&checks, ok && newest_is(equal, false, "step-00000040"),
          "equal counts of saves: by step %s", err.text);
    edited.save = TRAINER_MOST_SAVES;
    ok = ok && trainer_state_write(in(out, "step-00000012/trainer.json"), &edited, NULL, &err) &&
         save_one(out, 31, &TINY, &err) &&
         trainer_state_read(in(out, "step-00000031"), &edited, &err);
    check(&checks, ok && checkpoint_next_save(out, 0) == TRAINER_MOST_SAVES,
          "the largest count of saves stays %s", err.text);
    ok = save_one(equal, 7, &TINY, &err);
    check(&checks, ok && newest_is(equal, false, "step-00000007"),
          "and a larger count is later %s", err.text);
}

// Returns true if the file is still as its owner wrote it.
static bool is_mine(const char *path) {
    size_t bytes = 0;
    char *text = read_file(path, &bytes);
    bool same = text && bytes == 4 && memcmp(text, "mine", 4) == 0;
    free(text);
    return same;
}

// Files under --out that we did not write stay, whatever their names are.
static void test_foreign_files(void) {
    static const char *const files[] = {
        "tmp-2024/thesis.tex", "tmp-00000004-of-2024/model.safetensors", "step-1/notes",
        "tmp-00000003-node-12/notes", "step-00000005/model.safetensors",
        "step-00000006/notes", "step-00000008/notes"};
    enum { COUNT = sizeof files / sizeof files[0] };
    Error err;
    char folder[64], moved[PATH_MAX];
    const char *out = in_root("uo");
    bool ok = save_one(out, 6, &TINY, &err);
    for (int i = 0; i < COUNT; i++) {
        snprintf(folder, sizeof folder, "%.*s", (int)strcspn(files[i], "/"), files[i]);
        mkdir(in(out, folder), 0777);
        write_text(in(out, files[i]), "mine");
    }
    ok = ok && checkpoint_claim(out, true, &lock, &err);
    for (size_t step = 7; step < 10; step++) {
        ok = ok && save_one(out, step, &TINY, &err);
        checkpoint_prune(out, 1, step);
    }
    ok = ok && checkpoint_claim(out, true, &lock, &err) && latest_is(out, "step-00000009");
    ok = ok && checkpoint_tmp_path(moved, out, 8, &err);
    for (int i = 0; i < COUNT; i++) {
        // The folder that stood where a checkpoint had to go gave way.
        const char *path = i < COUNT - 1 ? in(out, files[i]) : in(moved, "notes");
        if (!is_mine(path)) ok = error_set(&err, "%s is gone", path);
    }
    check(&checks, ok, "%d files of others under --out stay%s%s", (int)COUNT, ok ? "" : ": ",
          ok ? "" : err.text);
}

// A removal that was interrupted behind any of its files is completed by the next run.
static void test_cut_removal(void) {
    Error err = {""};
    const char *out = in_root("cut");
    bool ok = true;
    for (int gone = 0; gone <= CHECKPOINT_FILE_COUNT; gone++) {
        char name[32];
        snprintf(name, sizeof name, "tmp-00000005-node-%d", gone + 1);
        const char *folder = in(out, name);
        ok = ok && folder_make(folder, &err);
        for (int i = gone; i < CHECKPOINT_FILE_COUNT; i++)
            write_text(in(folder, CHECKPOINT_FILES[i]), "x");
    }
    ok = ok && count_entries(out) == CHECKPOINT_FILE_COUNT + 1 &&
         checkpoint_claim(out, true, &lock, &err);
    check(&checks, ok && count_entries(out) == 0, "what is left of interrupted removals goes %s",
          err.text);
}

// Two runs with one --out: the second one is refused until the first has ended, however it ends.
static void test_lock(void) {
    Error err = {""};
    char name[64] = "";
    const char *out = in_root("lock");
    int ends[2];
    if (pipe(ends) != 0) exit(1);
    pid_t child = fork();
    if (child == 0) {
        bool claimed = checkpoint_claim(out, true, &lock, &err);
        if (write(ends[1], &claimed, sizeof claimed) < 0) _exit(1);
        for (;;) pause();
    }
    bool claimed = false;
    bool ok = read(ends[0], &claimed, sizeof claimed) == sizeof claimed && claimed;
    snprintf(name, sizeof name, " %ld:", (long)child);
    ok = ok && !checkpoint_claim(out, true, &lock, &err);
    ok = ok && says(&err, "is in use by another run, process") && says(&err, name);
    check(&checks, ok, "one writer: a second run is refused -> %s", err.text);
    ok = checkpoint_claim(out, false, &lock, &err) && count_entries(out) == 0;
    check(&checks, ok, "the other ranks of a run look only whether they can write");
    int status;
    kill(child, SIGKILL);
    ok = waitpid(child, &status, 0) == child && checkpoint_claim(out, true, &lock, &err);
    check(&checks, ok, "the lock dies with its process");
    const char *tex = in_root("locked.tex"), *dot_lock = in(out, ".lock");
    write_text(tex, "mine");
    ok = unlink(dot_lock) == 0 && symlink("../locked.tex", dot_lock) == 0;
    ok = ok && !checkpoint_claim(out, true, &lock, &err) && says(&err, "it is a symbolic link") &&
         unlink(dot_lock) == 0 && rename(tex, dot_lock) == 0 &&
         checkpoint_claim(out, true, &lock, &err);
    check(&checks, ok && is_mine(dot_lock), "a file .lock of somebody stays as it is %s", err.text);
    int before = lock;
    ok = folder_keep_lock(out, &lock, &err) && lock == before && unlink(dot_lock) == 0 &&
         folder_keep_lock(out, &lock, &err) && file_exists(dot_lock);
    check(&checks, ok, "a lock that was removed is taken again %s", err.text);
    close(ends[0]);
    close(ends[1]);
}

// --out of every length near the limit, the longest first: a run that may start can save.
static void test_path_lengths(void) {
    char out[PATH_MAX + 256];
    Error err = {""};
    size_t n = (size_t)snprintf(out, sizeof out, "%s", root);
    int accepted = 0, refused = 0;
    bool ok = true;
    while (n < PATH_MAX - 340) {
        n += (size_t)sprintf(out + n, "/");
        memset(out + n, 'd', 200);
        out[n += 200] = '\0';
        ok &= mkdir(out, 0777) == 0;
    }
    out[n++] = '/';
    memset(out + n, 'e', 330);
    out[n + 120] = '/';  // a name has at most 255 characters
    for (size_t length = PATH_MAX + 4; accepted < 3 && length > n + 121; length--) {
        out[length] = '\0';
        if (checkpoint_claim(out, true, &lock, &err)) {
            accepted++;
            ok &= save_one(out, 12345678, &TINY, &err);
        } else {
            refused++;
            ok &= says(&err, "too long");
        }
    }
    check(&checks, ok && accepted == 3 && refused > 20,
          "--out is refused at once where it is too long (%d lengths), and one less can be saved "
          "to%s%s",
          refused, ok ? "" : ": ", ok ? "" : err.text);
}

// Tests that damaged checkpoints under --out do not count.
static void test_unsound(void) {
    Error err;
    char path[PATH_MAX];
    const char *out = in_root("unsound");
    bool ok = true;
    for (size_t step = 1; step <= 4; step++) ok = ok && save_one(out, step, &TINY, &err);
    ok = ok && latest_is(out, "step-00000004") &&
         truncate(in(out, "step-00000004/trainer.json"), 0) == 0;
    check(&checks, ok && latest_is(out, "step-00000003"),
          "--resume auto passes over an empty trainer.json");
    ok = truncate(in(out, "step-00000003/optimizer.safetensors"), 1000) == 0;
    check(&checks, ok && latest_is(out, "step-00000002"), "a truncated optimizer");
    ok = unlink(in(out, "step-00000002/model.safetensors")) == 0;
    check(&checks, ok && latest_is(out, "step-00000001"), "weights that are missing");
    ok = unlink(in(out, "step-00000001/config.json")) == 0;
    ok &= !latest_sound(out, true, path, &err) &&
          says(&err, "no checkpoint under") && says(&err, "step-00000004/trainer.json");
    check(&checks, ok,
          "and where none is sound it refuses, and names what is wrong with the newest");
}

// Tests that several ranks read a share each. Their sums together equal the sums of one rank
// that reads all, and no share alone does.
static void test_shares(void) {
    Error err = {""};
    const char *dir = in_root("shares/step-00000001");
    // Some tensors are longer than a piece.
    static const GPTConfig wide = {2,   192, 3,   700, 768, 40,  NULL};
    bool ok = save_one(in_root("shares"), 1, &wide, &err);
    Checksums whole, sums[5];
    ok = ok && checkpoint_sum(dir, NULL, 0, 1, true, &whole, &err) &&
         checkpoint_matches(dir, &whole, &err);
    size_t partial = 0, wrong = 0;
    for (size_t rank = 0; rank < 5 && ok; rank++) {
        ok = checkpoint_sum(dir, NULL, rank, 5, true, &sums[rank], &err) &&
             sums[rank].count == whole.count;
        partial += !checkpoint_matches(dir, &sums[rank], &err) && says(&err, "is damaged: ");
    }
    for (size_t i = 0; i < whole.count && ok; i++) {
        uint64_t sum = 0;
        for (size_t rank = 0; rank < 5; rank++) sum += sums[rank].sums[i];
        wrong += sum != whole.sums[i];
    }
    check(&checks, ok && partial == 5 && wrong == 0,
          "the shares of 5 ranks add up to the checksums%s%s", ok ? "" : ": ",
          ok ? "" : err.text);
    for (size_t rank = 0; rank < 5 && ok; rank++) free(sums[rank].sums);
    free(whole.sums);
    // Weights in several files have their sums too.
    const char *path = in(dir, "model.safetensors");
    SafeTensors st;
    ok = ok && st_open(&st, path, O_RDONLY, &err);
    FILE *file = ok ? fopen(in(dir, "model.safetensors.index.json"), "w") : NULL;
    for (size_t i = 0; file && i < st.count; i++) {
        fprintf(file, "%s\"%s\":\"model-00001.safetensors\"", i ? "," : "{\"weight_map\":{",
                st.entries[i].name);
    }
    if (file) fputs("}}", file), fclose(file);
    if (ok) st_close(&st);
    ok = ok && file && rename(path, in(dir, "model-00001.safetensors")) == 0 &&
         checkpoint_verify(dir, &err);
    check(&checks, ok, "and are found where an index says%s%s", ok ? "" : ": ", ok ? "" : err.text);
}

// A flipped bit anywhere in the tensors, or files of two saves, are found by the checksums.
static void test_checksums(void) {
    Error err = {""};
    const char *out = in_root("sums"), *dir = in(out, "step-00000002"), *path;
    static const char *const files[] = {"model.safetensors", "optimizer.safetensors"};
    for (int bf16 = 0; bf16 < 2; bf16++) {
        bool ok = save(out, 1, &TINY, &ONE, bf16, &err) && save(out, 2, &TINY, &ONE, bf16, &err) &&
                  checkpoint_verify(dir, &err);
        int found = 0, rounds = 0;
        for (int f = 0; f < 2 && ok; f++) {
            size_t bytes;
            uint64_t header;
            path = in(dir, files[f]);
            char *data = read_file(path, &bytes);
            memcpy(&header, data, sizeof header);
            for (; rounds < 100 * (f + 1); rounds++) {
                size_t place = 8 + header + mix((uint64_t)rounds) % (bytes - 8 - header);
                data[place] ^= (char)(1 << rounds % 8);
                write_file(path, data, bytes);
                found += !checkpoint_verify(dir, &err) && says(&err, "is damaged: ");
                data[place] ^= (char)(1 << rounds % 8);
            }
            write_file(path, data, bytes);
            free(data);
        }
        ok = ok && checkpoint_verify(dir, &err);
        check(&checks, ok && found == rounds && rounds == 200,
              "%s: %d of %d flipped bits are found by the checksums", bf16 ? "bf16" : "fp32",
              found, rounds);
        // Two neighbours that change places leave a plain sum as it is.
        size_t bytes;
        path = in(dir, files[1]);
        char *data = read_file(path, &bytes), four[4];
        memcpy(four, data + bytes - 8, 4);
        memmove(data + bytes - 8, data + bytes - 4, 4);
        memcpy(data + bytes - 4, four, 4);
        write_file(path, data, bytes);
        ok = !checkpoint_verify(dir, &err) && says(&err, "is damaged") &&
             latest_is(out, "step-00000001");
        check(
            &checks, ok,
            "so are elements that changed places, and --resume auto takes the checkpoint before");
        check(&checks, newest_is(out, false, "step-00000002"), "or, not to be verified, that one");
        free(data);
    }
    // The weights of one run with the optimizer of another, as two runs with one --out once made
    // them.
    dir = in_root("mixed/step-00000002");
    bool ok = save_one(in_root("mixed"), 2, &TINY, &err);
    path = in(dir, files[0]);
    size_t bytes;
    char *data = read_file(path, &bytes);
    memset(data + bytes - 32 * 4, 0, 32 * 4);  // ln_f of the other run
    write_file(path, data, bytes);
    free(data);
    ok = ok && !checkpoint_verify(dir, &err) && says(&err, "model.safetensors is damaged: ");
    check(&checks, ok, "a half-mixed checkpoint is refused -> %s", err.text);
    TrainerState state = example_state(2);
    path = in(dir, "trainer.json");
    ok = trainer_state_write(path, &state, NULL, &err) && !checkpoint_verify(dir, &err) &&
         says(&err, "has no checksum of state");
    check(&checks, ok, "a checkpoint without checksums cannot be compared, and is refused -> %s",
          err.text);
    ok = trainer_state_write(path, &state, "{\"wte.weight\": 1}", &err) &&
         !checkpoint_verify(dir, &err) && says(&err, "has no checksum of state");
    check(&checks, ok, "one whose checksums are none is not");
}

// Members of config.json that no tensor's shape shows have a sum of their own, which older
// checkpoints lack.
static void test_config_sum(void) {
    Error err = {""};
    const char *out = in_root("edited"), *dir = in(out, "step-00000001"),
               *config = in(dir, "config.json");
    bool ok = save_one(out, 1, &TINY, &err) && checkpoint_verify(dir, &err);
    char *text = read_file(config, NULL),
         *edited = replaced(text, "\"eos_token_id\": null", "\"eos_token_id\": 1234");
    write_text(config, edited);
    ok = ok && !checkpoint_verify(dir, &err) &&
         says(&err, "config.json is damaged: the file has the checksum");
    check(&checks, ok, "a member of config.json that was edited is found -> %s", err.text);
    const char *trainer = in(dir, "trainer.json");
    char *sums = read_file(trainer, NULL), *last = strstr(sums, ",\n    \"config.json\"");
    if (last) strcpy(last, "\n  }\n}\n");
    write_text(trainer, sums);
    check(&checks, ok && last && checkpoint_verify(dir, &err),
          "a checkpoint without this sum stays valid %s", err.text);
    free(text), free(edited), free(sums);
}

// SIGKILL at any moment of saving: the newest checkpoint is a whole one.
static void test_kill(void) {
    const char *out = in_root("kill");
    Error err = {""};
    char dir[PATH_MAX];
    bool ok = save_one(out, 0, &TINY, &err);
    int most = 0;
    for (int round = 0; round < 40 && ok; round++) {
        pid_t child = fork();
        if (child == 0) {
            if (!checkpoint_claim(out, true, &lock, &err)) _exit(1);
            for (size_t step = 1;; step++) {
                if (!save_one(out, step % 7, &TINY, &err)) _exit(1);
                checkpoint_prune(out, 2, step % 7);
            }
        }
        struct timespec pause = {0, (long)(mix((uint64_t)round) % 8000000)};
        nanosleep(&pause, NULL);
        kill(child, SIGKILL);
        int status;
        waitpid(child, &status, 0);
        ok = WIFSIGNALED(status) || error_set(&err, "a save failed");
        TrainerState state;
        ok = ok && latest_sound(out, true, dir, &err) &&
             (dir[0] || error_set(&err, "no checkpoint is left"));
        ok = ok && checkpoint_is_complete(dir, &TINY, 3, &err) &&
             trainer_state_read(dir, &state, &err) &&
             each_rank(&TINY, &ONE, false, dir, job_read, &err);
        if ((int)count_entries(out) > most) most = (int)count_entries(out);
    }
    check(&checks, ok,
          "killed 40 times while saving, the newest checkpoint is whole%s%s (at most %d folders)",
          ok ? "" : ": ", ok ? "" : err.text, most);
}

// In a child with little room: a save that fits, then one that does not. Returns the exit code.
static int full_disk(const char *out, const GPTConfig *large, bool limit_now) {
    Error err = {""};
    char tmp[PATH_MAX];
    if (!save_one(out, 1, &TINY, &err)) return 1;
    if (limit_now) {
        struct rlimit limit = {65536, 65536};
        signal(SIGXFSZ, SIG_IGN);
        if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 2;
    }
    if (save_one(out, 2, large, &err)) return 3;
    if (!says(&err, "cannot write") ||
        !says(&err, limit_now ? "File too large" : "No space left"))
        return 4;
    if (count_entries(out) != 1 || !latest_is(out, "step-00000001")) return 5;
    if (!each_rank(&TINY, &ONE, false, in(out, "step-00000001"), job_read, &err)) return 6;
    if (!save_one(out, 3, &TINY, &err)) return 7;
    // The disk fills up later: while a rank writes.
    if (!checkpoint_create(out, &no_lock, 4, &TINY, false, NULL, tmp, &err)) return 8;
    struct rlimit none = {100, 100};
    signal(SIGXFSZ, SIG_IGN);
    if (setrlimit(RLIMIT_FSIZE, &none) != 0) return 9;
    if (each_rank(&TINY, &ONE, false, tmp, job_write, &err) || !says(&err, "cannot write"))
        return 10;
    checkpoint_remove(tmp);
    return latest_is(out, "step-00000003") && count_entries(out) == 2 ? 0 : 11;
}

static void test_full_disk(void) {
    static const GPTConfig large = {4, 64, 4, 1000, 1024, 64, NULL};
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) _exit(full_disk(in_root("limit"), &large, true));
    waitpid(child, &status, 0);
    check(&checks, status == 0,
          "file size limit while saving: one sentence, previous checkpoint intact (%d)",
          status >> 8);
    fflush(stdout);
    child = fork();
    if (child == 0) {  // a disk of 256 KiB that only this process sees
        const char *disk = in_root("disk");
        mkdir(disk, 0777);
        if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
            mount("none", disk, "tmpfs", 0, "size=256k") != 0) _exit(77);
        _exit(full_disk(disk, &large, false));
    }
    waitpid(child, &status, 0);
    if (status >> 8 == 77) {
        printf("     no right to mount a small disk: only the file size limit was tested\n");
        return;
    }
    check(&checks, status == 0,
          "full disk while saving: one sentence, previous checkpoint intact (%d)", status >> 8);
}

// Tests a save whose name is taken by a folder that cannot be renamed. A checkpoint of ours is
// removed. Anything else stays, and so does the new folder.
static void test_fixed(void) {
    Error err = {""};
    TrainerState state;
    const char *out = in_root("fixed"), *named = in(out, "step-00000004");
    bool ok = save_one(out, 4, &TINY, &err);
    fixed_folder = named;
    ok = ok && save(out, 4, &TINY, &ONE, true, &err) && count_entries(out) == 1 &&
         checkpoint_is_complete(named, &TINY, 4, &err);
    check(&checks, ok, "a checkpoint that cannot be renamed is replaced %s", err.text);
    ok = save_one(out, 5, &TINY, &err);
    checkpoint_prune(out, 1, 5);
    check(&checks, ok && count_entries(out) == 1, "or pruned");
    out = in_root("held"), named = fixed_folder = in(out, "step-00000006");
    ok = folder_make(named, &err);
    write_text(in(named, "notes"), "mine");
    ok = ok && !save_one(out, 6, &TINY, &err) &&
         says(&err, "the checkpoint is whole, and stays in ");
    check(&checks, ok && is_mine(in(named, "notes")) && count_entries(out) == 2,
          "somebody's folder stays, and so does the checkpoint that should have its name -> %s",
          err.text);
    char stays[PATH_MAX];
    snprintf(stays, sizeof stays, "%s", strstr(err.text, "stays in ") + strlen("stays in "));
    ok = ok && checkpoint_claim(out, true, &lock, &err) &&
         trainer_state_read(stays, &state, &err) && state.step == 6;
    check(&checks, ok && checkpoint_verify(stays, &err),
          "also when the next run clears the folder up %s", err.text);
    fixed_folder = NULL;
    ok = ok && unlink(in(named, "notes")) == 0 && checkpoint_claim(out, true, &lock, &err);
    check(&checks, ok && latest_is(out, "step-00000006") && count_entries(out) == 1,
          "which gives it its name once this is free");
}

// The same on overlayfs itself: in a container that was made from an image with a run in it.
static int overlay(const char *lower) {
    Error err = {""};
    const char *upper = in(lower, "../upper"), *work = in(lower, "../work"),
               *mounted = in(lower, "../mounted");
    char options[PATH_MAX];
    snprintf(options, sizeof options, "lowerdir=%s,upperdir=%s,workdir=%s", lower, upper, work);
    if (mkdir(upper, 0777) != 0 || mkdir(work, 0777) != 0 || mkdir(mounted, 0777) != 0) return 1;
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("overlay", mounted, "overlay", 0, options) != 0) return 77;
    if ((rename)(in(mounted, "step-00000004"), in(mounted, "other")) == 0)
        return 77;  // mounted with redirect_dir
    if (!save(mounted, 4, &TINY, &ONE, true, &err)) return fprintf(stderr, "%s\n", err.text), 2;
    if (count_entries(mounted) != 2 || !latest_is(mounted, "step-00000004")) return 3;
    if (!checkpoint_is_complete(in(mounted, "step-00000004"), &TINY, 4, &err)) return 4;
    checkpoint_prune(mounted, 1, 4);
    return count_entries(mounted) == 1 ? 0 : 5;
}

static void test_overlay(void) {
    Error err = {""};
    int status = 0;
    const char *lower = in_root("lower");
    bool ok = save_one(lower, 2, &TINY, &err) && save_one(lower, 4, &TINY, &err);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) _exit(overlay(lower));
    waitpid(child, &status, 0);
    if (status >> 8 == 77) printf("     no right to mount overlayfs: only its error was tested\n");
    else
        check(&checks, ok && status == 0,
              "in a lower layer of overlayfs it is replaced and pruned, too (%d)", status >> 8);
}

// ----------------------------------------------------------------------------------------

int main(void) {
    const char *tmpdir = getenv("TMPDIR") ? getenv("TMPDIR") : P_tmpdir;
    // In memory, because there are hundreds of fsyncs.
    const char *base = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : tmpdir;
    snprintf(root, sizeof root, "%s/llmc-test-XXXXXX", base);
    if (!mkdtemp(root)) die("cannot create", root);
    test_headers();
    test_damage();
    test_types();
    test_layouts();
    test_foreign();
    test_extra();
    test_split();
    test_config();
    test_kept();
    test_reals();
    test_state();
    test_folders();
    test_order();
    test_foreign_files();
    test_cut_removal();
    test_lock();
    test_path_lengths();
    test_unsound();
    test_checksums();
    test_config_sum();
    test_shares();
    test_kill();
    test_full_disk();
    test_fixed();
    test_overlay();
    remove_tree(root);
    return check_summary(&checks);
}
