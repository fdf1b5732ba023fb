// checksums.h: a sum for each tensor of a checkpoint, which trainer.json holds and --resume compares with the files.
//
// A sum adds up, modulo 2^64, a mix of place and bits of every element. So every rank adds what it writes, in any
// order, and the ranks' sums added together are those of the whole tensors, whatever the layout is. They find what
// disks, copies and people damage; they are no protection against somebody who means it.
//
// defines: Checksums, checksums_make, checksums_free, checksum_floats, ChecksumShare, checksum_tensor
#ifndef LLMC_CHECKSUMS_H
#define LLMC_CHECKSUMS_H

#include "llmc/host/safetensors.h"
#include "llmc/model.h"

typedef struct {
    GPTConfig config;
    size_t kinds, tensors;  // weights, m, v and for bf16 master weights; of the unsharded model
    size_t count;           // kinds * tensors
    uint64_t *sums;         // [count] kind after kind: what is to be added over all ranks
} Checksums;

static inline Checksums checksums_make(const GPTConfig *config, bool bf16) {
    Checksums c = {*config, bf16 ? 4u : 3u, count_tensors(config), 0, NULL};
    c.count = c.kinds * c.tensors;
    c.sums = (uint64_t *)host_alloc(c.count, sizeof(uint64_t));
    return c;
}

static inline void checksums_free(Checksums *c) {
    free(c->sums);
    memset(c, 0, sizeof *c);
}

// What an element adds to its tensor's sum: the finalizer of SplitMix64 (Steele et al. 2014) on place and bits.
static inline uint64_t checksum_element(uint64_t place, uint32_t bits) {
    uint64_t x = place * 0x9e3779b97f4a7c15u + bits;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// Of elements [first, first + count) of a tensor, as they will stand in the file: F32, or rounded to BF16.
static inline uint64_t checksum_floats(const float *values, STType dtype, size_t first, size_t count) {
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        sum += checksum_element(first + i, dtype == ST_BF16 ? bf16_from_float(values[i]) : bits);
    }
    return sum;
}

// Which pieces of a checkpoint one of `shares` ranks reads: every shares-th, from number `share` on.
typedef struct {
    size_t share, shares;
    size_t piece;  // the number of the next one
} ChecksumShare;

// Adds this share of a tensor in a file, which must have the type that it was saved with.
static inline bool checksum_tensor(const SafeTensors *st, const STEntry *x, ChecksumShare *turn, uint64_t *sum,
                                   Error *err) {
    enum { STAGE = 1 << 16 };
    if (x->dtype != ST_F32 && x->dtype != ST_BF16) {
        return error_set(err, "%s: tensor %s is neither F32 nor BF16, as it was saved", st->path, x->name);
    }
    char *stage = (char *)host_alloc(STAGE, sizeof(float));
    size_t got = 0, n;
    bool ok = true;
    for (size_t first = 0; first < x->count && ok; first += n) {
        n = x->count - first < STAGE ? x->count - first : (size_t)STAGE;
        if (turn->piece++ % turn->shares != turn->share) continue;
        errno = 0;
        ok = file_read_at(st_file_of(st, x), stage, n * x->width, x->begin + first * x->width, &got) &&
             got == n * x->width;
        for (size_t i = 0; i < n && ok; i++) {
            uint32_t bits;
            uint16_t half;
            if (x->dtype == ST_BF16) memcpy(&half, stage + i * sizeof half, sizeof half), bits = half;
            else memcpy(&bits, stage + i * sizeof bits, sizeof bits);
            *sum += checksum_element(first + i, bits);
        }
    }
    free(stage);
    return ok || error_set(err, "cannot read tensor %s of %s: %s", x->name, st->path,
                           errno ? strerror(errno) : "the file has become shorter");
}

#endif
