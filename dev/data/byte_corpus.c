// byte_corpus.c: makes training data from any files without a tokenizer. A token is a byte (0 to
// 255) or 256, <|endoftext|>.
//
//   byte_corpus TRAIN.bin VAL.bin FILE...
//
// Writes two shards in llm.c's format: 256 int32 (magic 20240520, version 1, number of tokens),
// then uint16 tokens. <|endoftext|> stands before each file. Every 20th block of 2 KiB goes to
// VAL.bin. That cuts a file into pieces that do not belong together, so <|endoftext|> stands
// before each piece too.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "dev/plot/tool.h"

enum { BLOCK = 2048, VAL_EVERY = 20, VAL_PHASE = 10, END_OF_TEXT = 256, HEADER = 256 };

typedef struct {
    const char *path;
    char *tmp;  // the shard takes its name when it is complete
    FILE *file;
    int64_t tokens;
} Shard;

static Shard shards[2];  // training, validation

// Ends the program, without a half-written shard.
static void give_up(const char *what, const char *path, const char *why) {
    fprintf(stderr, "byte_corpus: %s %s: %s\n", what, path, why);
    for (int i = 0; i < 2; i++) {
        if (shards[i].file) unlink(shards[i].tmp);
    }
    exit(1);
}

static void fail(const char *what, const char *path) { give_up(what, path, strerror(errno)); }

static bool same_file(const char *a, const char *b) {
    struct stat x, y;
    return strcmp(a, b) == 0 ||
           (stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino);
}

// Refuses an output that has the name of a device, a link or an input, because a shard replaces
// the file of its name.
static void check_output(const char *path, char **inputs, int count) {
    struct stat info;
    if (lstat(path, &info) == 0 && !S_ISREG(info.st_mode))
        give_up("cannot replace", path, "it is no regular file");
    for (int i = 0; i < count; i++) {
        if (same_file(path, inputs[i]))
            give_up("cannot write", path, "it is also another argument");
    }
}

static void shard_write_header(Shard *shard) {
    int32_t header[HEADER] = {20240520, 1, (int32_t)shard->tokens};
    if (fwrite(header, sizeof header, 1, shard->file) != 1) fail("cannot write", shard->path);
}

static void shard_open(Shard *shard, const char *path) {
    shard->path = path;
    if (asprintf(&shard->tmp, "%s.tmp", path) < 0) fail("no memory for", path);
    unlink(shard->tmp);  // of a run that was killed
    shard->file = fopen(shard->tmp, "wbx");
    if (!shard->file) fail("cannot create", path);
    shard_write_header(shard);
}

static void shard_put(Shard *shard, const uint16_t *tokens, size_t count) {
    if (fwrite(tokens, sizeof *tokens, count, shard->file) != count)
        fail("cannot write", shard->path);
    shard->tokens += (int64_t)count;
    if (shard->tokens > INT32_MAX)
        give_up("cannot write", shard->path, "more than 2^31 - 1 tokens: give fewer files");
}

static void shard_finish(Shard *shard) {
    rewind(shard->file);
    shard_write_header(shard);
    if (fflush(shard->file) != 0 || fsync(fileno(shard->file)) != 0)
        fail("cannot write", shard->path);
}

int main(int argc, char **argv) {
    static const char usage[] =
        "usage: byte_corpus TRAIN.bin VAL.bin FILE...\n"
        "Writes the bytes of the files as training and validation shards (a 20th goes to "
        "VAL.bin).\n";
    tool_begin(argc, argv, usage);
    if (argc < 4 || argv[1][0] == '-') return fputs(usage, stderr), 2;
    // A shard that grows too large is an error of the write, with a message.
    signal(SIGXFSZ, SIG_IGN);
    check_output(argv[1], argv + 2, argc - 2);
    check_output(argv[2], argv + 3, argc - 3);
    shard_open(&shards[0], argv[1]);
    shard_open(&shards[1], argv[2]);
    const uint16_t end_of_text = END_OF_TEXT;
    size_t position = 0;  // in all files together, so that small files are shared out too
    for (int i = 3; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        if (!file) fail("cannot read", argv[i]);
        unsigned char bytes[BLOCK];
        uint16_t tokens[BLOCK];
        int last = -1;  // the shard that has the previous piece of this file
        for (;;) {
            // Up to the end of the block.
            size_t n = fread(bytes, 1, BLOCK - position % BLOCK, file);
            if (ferror(file)) fail("cannot read", argv[i]);
            if (n == 0) break;
            int now = position / BLOCK % VAL_EVERY == VAL_PHASE;
            if (now != last) shard_put(&shards[now], &end_of_text, 1);
            for (size_t j = 0; j < n; j++) tokens[j] = bytes[j];
            shard_put(&shards[now], tokens, n);
            last = now;
            position += n;
        }
        fclose(file);
    }
    if (position == 0) give_up("cannot write", argv[1], "the files are empty");
    for (int i = 0; i < 2; i++) shard_finish(&shards[i]);
    for (int i = 0; i < 2; i++) {
        if (rename(shards[i].tmp, shards[i].path) != 0) fail("cannot write", shards[i].path);
        printf("%s: %lld tokens\n", shards[i].path, (long long)shards[i].tokens);
    }
    return 0;
}
