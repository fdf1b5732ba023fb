// dataloader.h: training samples by number, from shards in llm.c's format.
//
// A shard is 256 int32 of header and its tokens, all little-endian. The header is magic 20240520, version 1 and the
// number of tokens if they are uint16, and magic 20240801, version 7 if they are uint32. Sample n is tokens
// n*T .. n*T+T: T inputs, and the same shifted by one as T targets. An epoch is the samples of all shards of a source,
// in the order of their names. Sample numbers continue from epoch to epoch, and each epoch has another order if it is
// shuffled. Several sources are blended by weight (blend.h): each then counts its own samples and epochs. The trainer
// decides which rank reads which sample: nothing here depends on the layout.
//
// defines: DataShard, DataSource, DataLoader, dataloader_open, dataloader_close, dataloader_check_batch,
//          dataloader_describe, dataloader_permute, dataloader_read
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H

#include <glob.h>

#include "llmc/host/blend.h"
#include "llmc/host/file.h"
#include "llmc/host/rand.h"

enum { SHARD_MAGIC = 20240520, SHARD_VERSION = 1, SHARD_MAGIC_32 = 20240801, SHARD_VERSION_32 = 7 };
enum { SHARD_HEADER_BYTES = 1024 };

typedef struct {
    char *path;
    size_t samples;
    size_t token_bytes;  // 2 or 4
} DataShard;

typedef struct {
    size_t first;           // its first shard
    size_t samples;         // of one epoch
    const DataShard *open;  // the last shard that was read stays open; NULL: none
    int fd;                 // its file
} DataSource;

typedef struct {
    size_t T;
    size_t samples;      // of one epoch of every source together
    size_t count;
    DataShard *shards;   // [count] source by source, sorted by name
    Blend blend;
    DataSource sources[BLEND_MOST_SOURCES];
    void *buffer;        // [T + 1] tokens as the shard has them
} DataLoader;

static inline void dataloader_close(DataLoader *dl) {
    for (size_t i = 0; i < dl->count; i++) free(dl->shards[i].path);
    for (size_t i = 0; i < dl->blend.sources; i++) {
        if (dl->sources[i].open) close(dl->sources[i].fd);
    }
    free(dl->shards);
    free(dl->buffer);
    blend_close(&dl->blend);
    memset(dl, 0, sizeof *dl);
}

// Checks the header of one shard and fills in its samples.
static inline bool shard_check(DataShard *shard, size_t T, Error *err) {
    int32_t header[SHARD_HEADER_BYTES / 4] = {0};
    uint64_t bytes;
    size_t got;
    int fd = file_open(shard->path, O_RDONLY, &bytes, err);
    if (fd < 0) return false;
    bool readable = file_read_at(fd, header, sizeof header, 0, &got) ||
                    error_set(err, "cannot read data shard %s: %s", shard->path, strerror(errno));
    close(fd);
    if (!readable) return false;
    shard->token_bytes = header[0] == SHARD_MAGIC ? 2 : 4;
    if ((header[0] != SHARD_MAGIC || header[1] != SHARD_VERSION) &&
        (header[0] != SHARD_MAGIC_32 || header[1] != SHARD_VERSION_32)) {
        return error_set(err, "%s is not a data shard: it begins with %d and version %d, not with %d and %d, or %d and "
                         "%d", shard->path, (int)header[0], (int)header[1], SHARD_MAGIC, SHARD_VERSION, SHARD_MAGIC_32,
                         SHARD_VERSION_32);
    }
    if (header[2] < 0 || bytes != SHARD_HEADER_BYTES + shard->token_bytes * (uint64_t)header[2]) {
        return error_set(err, "data shard %s is truncated or damaged: it says %d tokens, in %llu bytes", shard->path,
                         (int)header[2], (unsigned long long)bytes);
    }
    if ((size_t)header[2] < T + 1) {
        return error_set(err, "data shard %s has %d tokens, fewer than a sample of --seq %zu and its target",
                         shard->path, (int)header[2], T);
    }
    shard->samples = ((size_t)header[2] - 1) / T;
    return true;
}

static inline int shard_compare(const void *a, const void *b) {
    return strcmp(((const DataShard *)a)->path, ((const DataShard *)b)->path);
}

// Appends the shards of one source, whose names match a pattern.
static inline bool dataloader_add(DataLoader *dl, DataSource *source, const char *pattern, Error *err) {
    glob_t found;
    if (glob(pattern, GLOB_NOSORT, NULL, &found) != 0) return error_set(err, "no data shard matches '%s'", pattern);
    size_t first = dl->count;
    dl->count += found.gl_pathc;
    dl->shards = (DataShard *)host_resize(dl->shards, dl->count, sizeof(DataShard));
    memset(dl->shards + first, 0, found.gl_pathc * sizeof(DataShard));
    for (size_t i = first; i < dl->count; i++) dl->shards[i].path = host_string(found.gl_pathv[i - first]);
    globfree(&found);
    // Not glob's own order: that follows the locale, and ranks of one job may differ in it.
    qsort(dl->shards + first, dl->count - first, sizeof(DataShard), shard_compare);
    source->first = first;
    for (size_t i = first; i < dl->count; i++) {
        if (!shard_check(&dl->shards[i], dl->T, err)) return false;
        source->samples += dl->shards[i].samples;
    }
    dl->samples += source->samples;
    return true;
}

// Opens the shards that match a pattern, or blends several patterns ("WEIGHT:GLOB,WEIGHT:GLOB"), for sequences of T
// tokens. Refuses senseless weights, a pattern without files and a shard that is truncated, foreign or shorter than one
// sample. dataloader_close frees it; after an error nothing is left to free.
static inline bool dataloader_open(DataLoader *dl, const char *pattern, size_t T, Error *err) {
    memset(dl, 0, sizeof *dl);
    dl->T = T;
    if (!blend_open(&dl->blend, pattern, err)) return false;
    dl->buffer = host_alloc(T + 1, sizeof(uint32_t));
    for (size_t i = 0; i < dl->blend.sources; i++) {
        if (dataloader_add(dl, &dl->sources[i], dl->blend.patterns[i], err)) continue;
        dataloader_close(dl);
        return false;
    }
    return true;
}

// Refuses data whose epoch is shorter than a global batch of G sequences.
static inline bool dataloader_check_batch(const DataLoader *dl, size_t G, Error *err) {
    if (dl->samples >= G) return true;
    return error_set(err, "%s%s has %zu samples of --seq %zu, fewer than one --global-batch of %zu", dl->shards[0].path,
                     dl->count > 1 ? " with its sister shards" : "", dl->samples, dl->T, G);
}

// Writes the weight and the samples of each source: "7 x 4000 + 3 x 2000". If two texts differ, the same sample numbers
// mean other samples. Names are not part of the text, because data may be moved.
static inline void dataloader_describe(const DataLoader *dl, char *text, size_t size) {
    size_t n = 0;
    text[0] = '\0';
    for (size_t i = 0; i < dl->blend.sources && n < size; i++) {
        n += (size_t)snprintf(text + n, size - n, "%s%llu x %zu", n ? " + " : "",
                              (unsigned long long)dl->blend.weights[i], dl->sources[i].samples);
    }
}

// Permutes sample `index` < samples of an epoch, without memory: a Feistel network of eight Philox rounds permutes the
// next power of 4, and a result past the end passes through it again (cycle walking).
static inline uint64_t dataloader_permute(uint64_t index, uint64_t samples, uint64_t seed, uint64_t epoch) {
    unsigned half = 1;
    while (half < 32 && (UINT64_C(1) << (2 * half)) < samples) half++;
    uint64_t mask = (UINT64_C(1) << half) - 1;
    do {
        uint64_t left = index >> half, right = index & mask;
        for (uint64_t round = 0; round < 8; round++) {
            uint64_t mixed = left ^ (random_words(seed, RANDOM_SHUFFLE, epoch, round, right).word[0] & mask);
            left = right;
            right = mixed;
        }
        index = left << half | right;
    } while (index >= samples);
    return index;
}

// Reads global sample n into inputs [T] and targets [T]. With `shuffle` each epoch of its source is permuted. A token
// that is not below the vocabulary V is an error that names shard and position.
static inline bool dataloader_read(DataLoader *dl, uint64_t n, bool shuffle, uint64_t seed, size_t V,
                                   int *inputs, int *targets, Error *err) {
    BlendPlace place = blend_at(&dl->blend, n);
    DataSource *source = &dl->sources[place.source];
    uint64_t sample = place.number % source->samples, epoch = place.number / source->samples;
    if (shuffle) sample = dataloader_permute(sample, source->samples, seed, epoch);
    const DataShard *shard = &dl->shards[source->first];
    while (sample >= shard->samples) sample -= shard++->samples;
    if (source->open != shard) {
        uint64_t size;
        if (source->open) close(source->fd);
        source->fd = file_open(shard->path, O_RDONLY, &size, err);
        source->open = source->fd < 0 ? NULL : shard;
        if (!source->open) return false;
    }
    size_t first = sample * dl->T, width = shard->token_bytes, bytes = (dl->T + 1) * width, got;
    errno = 0;
    if (!file_read_at(source->fd, dl->buffer, bytes, SHARD_HEADER_BYTES + width * first, &got) || got < bytes) {
        return error_set(err, "cannot read tokens %zu to %zu of data shard %s: %s", first, first + dl->T, shard->path,
                         errno ? strerror(errno) : "it became shorter");
    }
    for (size_t i = 0; i <= dl->T; i++) {
        size_t token = width == 2 ? ((const uint16_t *)dl->buffer)[i] : ((const uint32_t *)dl->buffer)[i];
        if (token >= V) {
            return error_set(err, "data shard %s has token %zu at position %zu, but the vocabulary is %zu",
                             shard->path, token, first + i, V);
        }
        if (i < dl->T) inputs[i] = (int)token;
        if (i > 0) targets[i - 1] = (int)token;
    }
    return true;
}

#endif
