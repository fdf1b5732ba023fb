// file.h: reading and writing files at offsets, whole or not at all.
//
// defines: file_read_at, same_file_on_disk, file_open, file_read, file_open_output, file_write_at, file_reserve,
//          file_write_text
#ifndef LLMC_FILE_H
#define LLMC_FILE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/host/error.h"
#include "llmc/host/memory.h"

// Reads up to `bytes` bytes at `offset`; *got is less only at the end of the file. False: errno says why.
static inline bool file_read_at(int fd, void *out, size_t bytes, uint64_t offset, size_t *got) {
    *got = 0;
    while (*got < bytes) {
        size_t left = bytes - *got, ask = left < ((size_t)1 << 30) ? left : (size_t)1 << 30;  // 2 GiB is Linux's limit
        ssize_t n = pread(fd, (char *)out + *got, ask, (off_t)(offset + *got));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return false;
        if (n == 0) break;
        *got += (size_t)n;
    }
    return true;
}

// Two names of one file?
static inline bool same_file_on_disk(const char *a, const char *b) {
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

// Opens a regular file and gives its size; -1 with a sentence for anything else, pipes and folders included.
static inline int file_open(const char *path, int flags, uint64_t *size, Error *err) {
    int fd = open(path, flags | O_CLOEXEC | O_NONBLOCK);  // O_NONBLOCK: a pipe must not block us here
    struct stat info;
    if (fd < 0 || fstat(fd, &info) != 0) {
        error_set(err, "cannot open %s: %s", path, strerror(errno));
        if (fd >= 0) close(fd);
        return -1;
    }
    if (!S_ISREG(info.st_mode)) {
        error_set(err, "cannot open %s: not a regular file", path);
        close(fd);
        return -1;
    }
    *size = (uint64_t)info.st_size;
    return fd;
}

// A whole small file, followed by a NUL that *bytes does not count; free() it. NULL: see err.
static inline char *file_read(const char *path, size_t max_bytes, size_t *bytes, Error *err) {
    uint64_t size;
    int fd = file_open(path, O_RDONLY, &size, err);
    if (fd < 0) return NULL;
    if (size > max_bytes) {
        error_set(err, "%s is too large: %llu bytes where at most %zu are expected", path,
                  (unsigned long long)size, max_bytes);
        close(fd);
        return NULL;
    }
    char *text = (char *)host_alloc((size_t)size + 1, 1);
    bool ok = file_read_at(fd, text, (size_t)size, 0, bytes) ||
              error_set(err, "cannot read %s: %s", path, strerror(errno));
    close(fd);
    if (ok) return text;
    free(text);
    return NULL;
}

// Opens a file, device or pipe to write a stream to (flags: O_TRUNC or O_APPEND). Does not wait for somebody to read
// from a pipe: then it fails.
static inline FILE *file_open_output(const char *path, int flags, Error *err) {
    int fd = open(path, O_WRONLY | O_CREAT | O_NONBLOCK | O_CLOEXEC | flags, 0666);
    bool ok = fd >= 0 && fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK) == 0;
    FILE *file = ok ? fdopen(fd, flags & O_APPEND ? "ab" : "wb") : NULL;
    if (file) return file;
    error_set(err, "cannot write %s: %s", path, errno == ENXIO ? "nobody reads from that pipe" : strerror(errno));
    if (fd >= 0) close(fd);
    return NULL;
}

// Writes all bytes at an offset; false: errno says why.
static inline bool file_write_at(int fd, const void *data, size_t bytes, uint64_t offset) {
    for (size_t done = 0; done < bytes;) {
        size_t left = bytes - done, ask = left < ((size_t)1 << 30) ? left : (size_t)1 << 30;
        ssize_t n = pwrite(fd, (const char *)data + done, ask, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = ENOSPC;
        if (n <= 0) return false;
        done += (size_t)n;
    }
    return true;
}

// Reserves the blocks of the whole file, so that a full disk is met here and not half-way through.
static inline bool file_reserve(int fd, uint64_t bytes) {
#ifdef __linux__
    int failure = posix_fallocate(fd, 0, (off_t)bytes);
    while (failure == EINTR) failure = posix_fallocate(fd, 0, (off_t)bytes);
    if (failure != EOPNOTSUPP && failure != EINVAL) {
        errno = failure;
        return failure == 0;
    }
#endif
    return ftruncate(fd, (off_t)bytes) == 0;
}

// Writes a small file and waits until it is on the disk.
static inline bool file_write_text(const char *path, const char *text, Error *err) {
    FILE *f = fopen(path, "we");
    bool ok = f && fputs(text, f) >= 0 && fflush(f) == 0 && fsync(fileno(f)) == 0;
    int reason = errno;
    if (f && fclose(f) != 0 && ok) {
        ok = false;
        reason = errno;
    }
    return ok || error_set(err, "cannot write %s: %s", path, strerror(reason));
}

#endif
