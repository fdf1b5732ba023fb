// dataloader.h: training samples by number, from shards in llm.c's format.
//
// A shard is 256 int32 of header and its tokens, all little-endian. The header is magic
// 20240520, version 1 and the number of tokens if they are uint16, and magic 20240801,
// version 7 if they are uint32. Sample n is tokens n*T .. n*T+T: T inputs, and the same
// shifted by one as T targets. An epoch is the samples of all shards of a source, in the
// order of their names. Sample numbers continue from epoch to epoch, and each epoch has
// another order if it is shuffled. Several sources are blended by weight: each then counts
// its own samples and epochs. The trainer decides which rank reads which sample: nothing
// here depends on the layout.
//
// defines: DataShard, DataSource, DataLoader, blend_read, blend_make, blend_source,
//          dataloader_open, dataloader_close, dataloader_describe, dataloader_permute,
//          dataloader_read
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H

#include <glob.h>
#include <math.h>

#include "llmc/host/file.h"
#include "llmc/host/rand.h"

enum {
    SHARD_MAGIC = 20240520,
    SHARD_VERSION = 1,
    SHARD_MAGIC_32 = 20240801,
    SHARD_VERSION_32 = 7
};
enum { SHARD_HEADER_BYTES = 1024, BLEND_MOST_SOURCES = 64, BLEND_MOST_PARTS = 1 << 20 };

typedef struct {
    const char *path;
    size_t samples;
    size_t token_bytes;  // 2 or 4
} DataShard;

typedef struct {
    uint64_t weight;        // w_i: samples of a period
    const char *pattern;    // the names of its shards
    glob_t found;           // these names, sorted
    DataShard *shards;      // [found.gl_pathc]
    size_t samples;         // of one epoch
    const DataShard *open;  // the last shard that was read stays open; NULL: none
    int fd;                 // its file
} DataSource;

typedef struct {
    size_t T;
    size_t samples;       // of one epoch of every source together
    size_t source_count;  // 1: nothing is blended
    DataSource sources[BLEND_MOST_SOURCES];
    char *text;      // the patterns stand in it
    uint64_t parts;  // W, the period
    uint8_t *order;  // [parts] source of sample k, by k % parts
    uint32_t *turn;  // [parts] samples that this source has given before in this period
    void *buffer;    // [T + 1] tokens as the shard has them
} DataLoader;

static inline void dataloader_close(DataLoader *dl) {
    for (DataSource *source = dl->sources; source < dl->sources + dl->source_count;
         source++) {
        if (source->open) close(source->fd);
        globfree(&source->found);
        free(source->shards);
    }
    free(dl->buffer);
    free(dl->text);
    free(dl->order);
    free(dl->turn);
    memset(dl, 0, sizeof *dl);
}

static inline uint64_t blend_divisor(uint64_t a, uint64_t b) {
    return b ? blend_divisor(b, a % b) : a;
}

// Reads "WEIGHT:GLOB,WEIGHT:GLOB,...". A text that does not begin with a weight is one
// source. A weight is rounded to a whole number of 10^-9.
static inline bool blend_read(DataLoader *dl, const char *text, Error *err) {
    char *end;
    double weight = strtod(text, &end);
    bool blended = end > text && *end == ':';
    uint64_t divisor = 0;
    for (char *rest = dl->text = host_string(text); rest; dl->source_count++) {
        char *at = strsep(&rest, blended ? "," : "");
        weight = blended ? strtod(at, &end) : 1;
        if (dl->source_count == BLEND_MOST_SOURCES)
            return error_set(err, "'%s' blends more than %d data sets", text,
                             BLEND_MOST_SOURCES);
        if (blended && (end == at || *end != ':' || !end[1]))
            return error_set(err, "'%s' blends data sets, but '%s' is no WEIGHT:GLOB", text,
                             at);
        if (!(weight >= 0 && weight <= 1e6))
            return error_set(err,
                             "the weight '%.*s' of a data set is not from 0 to a million",
                             (int)(end - at), at);
        dl->sources[dl->source_count].weight = (uint64_t)llround(1e9 * weight);
        dl->sources[dl->source_count].pattern = blended ? end + 1 : at;
        divisor = blend_divisor(dl->sources[dl->source_count].weight, divisor);
    }
    if (divisor == 0)
        return error_set(err, "the weights of '%s' add up to 0: one must be more", text);
    for (size_t i = 0; i < dl->source_count; i++)
        dl->parts += dl->sources[i].weight /= divisor;
    return dl->parts <= BLEND_MOST_PARTS ||
           error_set(err,
                     "the weights of '%s' make %llu equal parts, and %d are the most: give "
                     "them fewer digits",
                     text, (unsigned long long)dl->parts, (int)BLEND_MOST_PARTS);
}

// Decides where each of the W samples of a period comes from.
//
// Weights are decimal numbers, brought to whole parts w_i of W = sum of w_i, as small as
// possible. Let n_i(k) count the samples of source i among the first k. The sequence must
// keep n_i(k) close to k w_i / W at every k. Tijdeman's algorithm for the chairman
// assignment problem (Discrete Mathematics 32, 1980) keeps |n_i(k) - k w_i / W| <= 1 -
// 1/(2n - 2) with n sources. At each k it looks at the sources with k w_i / W - n_i >=
// 1/(2n - 2), and takes the one whose share will first pass 1 - 1/(2n - 2). After W samples
// every n_i is w_i and the sequence repeats, so a table of W entries holds it, in whole
// numbers.
static inline void blend_make(DataLoader *dl) {
    int64_t W = (int64_t)dl->parts,
            D = dl->source_count > 1 ? 2 * (int64_t)dl->source_count - 2 : 1;
    uint32_t given[BLEND_MOST_SOURCES] = {0};
    dl->order = (uint8_t *)host_alloc(dl->parts, sizeof(uint8_t));
    dl->turn = (uint32_t *)host_alloc(dl->parts, sizeof(uint32_t));
    for (int64_t k = 1; k <= W; k++) {
        size_t best = 0;
        int64_t best_left = 1, best_weight = 0;  // later than any
        for (size_t i = 0; i < dl->source_count; i++) {
            int64_t w = (int64_t)dl->sources[i].weight,
                    owed = k * w - (int64_t)given[i] * W;  // of W
            // Divided by w, this is the time until its share passes the bound.
            int64_t left = (D - 1) * W - D * owed;
            if (D * owed < W || left * best_weight >= best_left * w) continue;
            best = i;
            best_left = left;
            best_weight = w;
        }
        dl->order[k - 1] = (uint8_t)best;
        dl->turn[k - 1] = given[best]++;
    }
}

// Returns the source of sample n, and its number among the samples of this source.
static inline DataSource *blend_source(DataLoader *dl, uint64_t n, uint64_t *number) {
    uint64_t i = n % dl->parts;
    DataSource *source = &dl->sources[dl->order[i]];
    *number = n / dl->parts * source->weight + dl->turn[i];
    return source;
}

// Checks the header of one shard and fills in its samples.
static inline bool shard_check(DataShard *shard, size_t T, Error *err) {
    int32_t header[SHARD_HEADER_BYTES / 4] = {0};
    uint64_t bytes;
    int fd = file_open(shard->path, O_RDONLY, &bytes, err);
    if (fd < 0) return false;
    bool readable =
        file_read_at(fd, header, sizeof header, 0) ||
        errno == 0 ||  // 0: too short, and refused below
        error_set(err, "cannot read data shard %s: %s", shard->path, strerror(errno));
    close(fd);
    if (!readable) return false;
    shard->token_bytes = header[0] == SHARD_MAGIC ? 2 : 4;
    if ((header[0] != SHARD_MAGIC || header[1] != SHARD_VERSION) &&
        (header[0] != SHARD_MAGIC_32 || header[1] != SHARD_VERSION_32)) {
        return error_set(err,
                         "%s is not a data shard: it begins with %d and version %d, not "
                         "with %d and %d, or %d and "
                         "%d",
                         shard->path, (int)header[0], (int)header[1], SHARD_MAGIC,
                         SHARD_VERSION, SHARD_MAGIC_32, SHARD_VERSION_32);
    }
    if (header[2] < 0 ||
        bytes != SHARD_HEADER_BYTES + shard->token_bytes * (uint64_t)header[2]) {
        return error_set(
            err, "data shard %s is truncated or damaged: it says %d tokens, in %llu bytes",
            shard->path, (int)header[2], (unsigned long long)bytes);
    }
    if ((size_t)header[2] < T + 1) {
        return error_set(
            err,
            "data shard %s has %d tokens, fewer than a sample of --seq %zu and its target",
            shard->path, (int)header[2], T);
    }
    shard->samples = ((size_t)header[2] - 1) / T;
    return true;
}

// Finds the files whose names match the pattern, or the file that has the pattern as its
// name (such as "run[1].bin"). The order is by bytes on every rank, because no program here
// leaves the C locale.
static inline bool dataloader_find(const char *pattern, glob_t *found) {
    char *literal = (char *)host_alloc(2 * strlen(pattern) + 1, 1), *end = literal;
    for (const char *c = pattern; *c; c++) {
        if (strchr("*?[]\\", *c)) *end++ = '\\';
        *end++ = *c;
    }
    bool is_name = access(pattern, F_OK) == 0;
    int failure = glob(is_name ? literal : pattern, 0, NULL, found);
    free(literal);
    return failure == 0;
}

// Finds the shards of one source.
static inline bool dataloader_add(DataLoader *dl, DataSource *source, Error *err) {
    if (!dataloader_find(source->pattern, &source->found))
        return error_set(err, "no data shard matches '%s'", source->pattern);
    source->shards = (DataShard *)host_alloc(source->found.gl_pathc, sizeof(DataShard));
    for (size_t i = 0; i < source->found.gl_pathc; i++) {
        source->shards[i].path = source->found.gl_pathv[i];
        if (!shard_check(&source->shards[i], dl->T, err)) return false;
        source->samples += source->shards[i].samples;
    }
    dl->samples += source->samples;
    return true;
}

// Opens the shards that match a pattern, or blends several patterns
// ("WEIGHT:GLOB,WEIGHT:GLOB"), for sequences of T tokens. Refuses:
//   weights that make no sense and patterns without files,
//   a shard that is truncated, foreign or shorter than one sample,
//   an epoch shorter than a global batch of G sequences.
// dataloader_close frees it; after an error nothing is left to free.
static inline bool dataloader_open(DataLoader *dl, const char *pattern, size_t T, size_t G,
                                   Error *err) {
    memset(dl, 0, sizeof *dl);
    dl->T = T;
    dl->buffer = host_alloc(T + 1, sizeof(uint32_t));
    bool ok = blend_read(dl, pattern, err);
    if (ok) blend_make(dl);
    for (size_t i = 0; ok && i < dl->source_count; i++)
        ok = dataloader_add(dl, &dl->sources[i], err);
    if (ok && dl->samples < G)
        ok = error_set(
            err, "'%s' has %zu samples of --seq %zu, fewer than one --global-batch of %zu",
            pattern, dl->samples, T, G);
    if (!ok) dataloader_close(dl);
    return ok;
}

// Writes the weight and the samples of each source: "7 x 4000 + 3 x 2000". If two texts
// differ, the same sample numbers mean other samples. Names are not part of the text,
// because data may be moved. The text of a shuffled blend also tells the kind of shuffling:
// in older builds all its sources had one order.
static inline void dataloader_describe(const DataLoader *dl, bool shuffle, char *text,
                                       size_t size) {
    size_t n = 0;
    text[0] = '\0';
    for (size_t i = 0; i < dl->source_count && n < size; i++) {
        n += (size_t)snprintf(text + n, size - n, "%s%llu x %zu", n ? " + " : "",
                              (unsigned long long)dl->sources[i].weight,
                              dl->sources[i].samples);
    }
    if (shuffle && dl->source_count > 1 && n < size)
        snprintf(text + n, size - n, ", each in an order of its own");
}

// Permutes sample `index` < samples of an epoch of source number `source`, without memory.
// A Feistel network of eight Philox rounds permutes the next power of 4. A result past the
// end passes through the network again (cycle walking).
static inline uint64_t dataloader_permute(uint64_t index, uint64_t samples, uint64_t seed,
                                          uint64_t epoch, uint64_t source) {
    enum { ROUNDS = 8 };
    unsigned half = 1;
    while (half < 32 && (UINT64_C(1) << (2 * half)) < samples) half++;
    uint64_t mask = (UINT64_C(1) << half) - 1;
    do {
        uint64_t left = index >> half, right = index & mask;
        for (uint64_t round = ROUNDS * source; round < ROUNDS * source + ROUNDS; round++) {
            uint64_t mixed =
                left ^
                (random_words(seed, RANDOM_SHUFFLE, epoch, round, right).word[0] & mask);
            left = right;
            right = mixed;
        }
        index = left << half | right;
    } while (index >= samples);
    return index;
}

// Reads global sample n into tokens [T + 1]. With `shuffle` each epoch of each source has a
// permutation of its own. A token that is not below the vocabulary V is an error that names
// shard and position.
static inline bool dataloader_read(DataLoader *dl, uint64_t n, bool shuffle, uint64_t seed,
                                   size_t V, int *tokens, Error *err) {
    uint64_t number;
    DataSource *source = blend_source(dl, n, &number);
    uint64_t sample = number % source->samples, epoch = number / source->samples;
    if (shuffle)
        sample = dataloader_permute(sample, source->samples, seed, epoch,
                                    (uint64_t)(source - dl->sources));
    const DataShard *shard = source->shards;
    while (sample >= shard->samples) sample -= shard++->samples;
    if (source->open != shard) {
        uint64_t size;
        if (source->open) close(source->fd);
        source->fd = file_open(shard->path, O_RDONLY, &size, err);
        source->open = source->fd < 0 ? NULL : shard;
        if (!source->open) return false;
    }
    size_t first = sample * dl->T, width = shard->token_bytes, bytes = (dl->T + 1) * width;
    if (!file_read_at(source->fd, dl->buffer, bytes, SHARD_HEADER_BYTES + width * first))
        return error_set(err, "cannot read tokens %zu to %zu of data shard %s: %s", first,
                         first + dl->T, shard->path, file_read_failure());
    for (size_t i = 0; i <= dl->T; i++) {
        size_t token = width == 2 ? ((const uint16_t *)dl->buffer)[i]
                                  : ((const uint32_t *)dl->buffer)[i];
        if (token >= V) {
            return error_set(
                err,
                "data shard %s has token %zu at position %zu, but the vocabulary is %zu",
                shard->path, token, first + i, V);
        }
        tokens[i] = (int)token;
    }
    return true;
}

#endif
