// file.h: reading and writing files at offsets, whole or not at all; making, locking and
// replacing folders.
//
// defines: file_read_at, file_read_failure, file_open, file_read, file_open_output,
//          file_write_at, file_reserve, file_write, file_write_text, path_print,
//          folder_make, folder_sync, folder_replace, file_lock, folder_lock,
//          folder_keep_lock
#ifndef LLMC_FILE_H
#define LLMC_FILE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "llmc/host/error.h"
#include "llmc/host/memory.h"

// Reads `bytes` bytes at an offset. False: errno says why; 0 if the file ends before.
static inline bool file_read_at(int fd, void *out, size_t bytes, uint64_t offset) {
    for (size_t done = 0; done < bytes;) {
        // A call reads 2 GiB at most.
        ssize_t n = pread(fd, (char *)out + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = 0;
        if (n <= 0) return false;
        done += (size_t)n;
    }
    return true;
}

// Returns the reason why file_read_at could not read a file that had more bytes when it was
// opened.
static inline const char *file_read_failure(void) {
    return errno ? strerror(errno) : "it became shorter";
}

// Opens a regular file and gives its size; -1 with an error message for anything else,
// pipes and folders included.
static inline int file_open(const char *path, int flags, uint64_t *size, Error *err) {
    // O_NONBLOCK: a pipe must not block us here.
    int fd = open(path, flags | O_CLOEXEC | O_NONBLOCK, 0666);
    struct stat info;
    bool known = fd >= 0 && fstat(fd, &info) == 0;
    if (known && S_ISREG(info.st_mode)) {
        *size = (uint64_t)info.st_size;
        return fd;
    }
    error_set(err, "cannot open %s: %s", path,
              known ? "not a regular file" : strerror(errno));
    if (fd >= 0) close(fd);
    return -1;
}

// Reads a whole small file, followed by a NUL that *bytes does not count. The caller frees
// it. NULL: see err.
static inline char *file_read(const char *path, size_t max_bytes, size_t *bytes,
                              Error *err) {
    uint64_t size;
    int fd = file_open(path, O_RDONLY, &size, err);
    if (fd < 0) return NULL;
    bool fits = size <= max_bytes ||
                error_set(err, "%s is too large: %llu bytes where at most %zu are expected",
                          path, (unsigned long long)size, max_bytes);
    char *text = fits ? (char *)host_alloc((size_t)size + 1, 1) : NULL;
    bool ok = fits && (file_read_at(fd, text, (size_t)size, 0) ||
                       error_set(err, "cannot read %s: %s", path, file_read_failure()));
    close(fd);
    *bytes = (size_t)size;
    if (ok) return text;
    free(text);
    return NULL;
}

// Opens a regular file to write a stream to it (flags: O_WRONLY | O_TRUNC, or O_RDWR |
// O_APPEND to read as well).
static inline FILE *file_open_output(const char *path, int flags, Error *err) {
    uint64_t size;
    int fd = file_open(path, O_CREAT | flags, &size, err);
    return fd < 0 ? NULL
                  : (FILE *)host_check(fdopen(fd, flags & O_APPEND ? "a+b" : "wb"), 1,
                                       sizeof(FILE));
}

// Writes all bytes at an offset; false: errno says why.
static inline bool file_write_at(int fd, const void *data, size_t bytes, uint64_t offset) {
    for (size_t done = 0; done < bytes;) {
        ssize_t n =
            pwrite(fd, (const char *)data + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = ENOSPC;
        if (n <= 0) return false;
        done += (size_t)n;
    }
    return true;
}

// Reserves the blocks of the whole file, so that a full disk is met here and not half-way
// through.
static inline bool file_reserve(int fd, uint64_t bytes) {
    int failure = posix_fallocate(fd, 0, (off_t)bytes);
    while (failure == EINTR) failure = posix_fallocate(fd, 0, (off_t)bytes);
    if (failure != EOPNOTSUPP && failure != EINVAL) {
        errno = failure;
        return failure == 0;
    }
    return ftruncate(fd, (off_t)bytes) == 0;
}

// Writes a small file and waits until it is on the disk.
static inline bool file_write(const char *path, const void *data, size_t bytes,
                              Error *err) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool ok = (fd >= 0 && file_write_at(fd, data, bytes, 0) && fsync(fd) == 0) ||
              error_set(err, "cannot write %s: %s", path, strerror(errno));
    if (fd >= 0) close(fd);
    return ok;
}

static inline bool file_write_text(const char *path, const char *text, Error *err) {
    return file_write(path, text, strlen(text), err);
}

// Prints into a path of PATH_MAX bytes, like snprintf. False with an error message if it
// does not fit.
__attribute__((format(printf, 3, 4))) static inline bool path_print(char path[PATH_MAX],
                                                                    Error *err,
                                                                    const char *format,
                                                                    ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(path, PATH_MAX, format, args);
    va_end(args);
    return (n >= 0 && n < PATH_MAX) ||
           error_set(err, "the path %.200s... is too long", path);
}

// Makes the folder and its missing parents.
static inline bool folder_make(const char *dir, Error *err) {
    char path[PATH_MAX];
    struct stat info;
    int failure = 0;  // the first that is not EEXIST
    if (!path_print(path, err, "%s/", dir)) return false;
    for (char *p = path; (p = strchr(p + 1, '/')) != NULL; *p = '/') {
        *p = '\0';
        if (mkdir(path, 0777) != 0 && errno != EEXIST && !failure) failure = errno;
    }
    if (stat(dir, &info) != 0)
        return error_set(err, "cannot create the folder '%s': %s", dir,
                         strerror(failure ? failure : errno));
    return S_ISDIR(info.st_mode) ||
           error_set(err, "cannot write to %s: it is not a folder", dir);
}

// Waits until the entries of a folder are on the disk.
static inline bool folder_sync(const char *dir, Error *err) {
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    // EINVAL: the file system lacks this operation, and there is nothing to wait for.
    bool ok = (fd >= 0 && (fsync(fd) == 0 || errno == EINVAL)) ||
              error_set(err, "cannot sync the folder %s: %s", dir, strerror(errno));
    if (fd >= 0) close(fd);
    return ok;
}

// Gives the folder `from` the name `to`. A file or folder that has this name gets the name
// `from` in the same step. Returns false with an error message and errno. EXDEV: the folder
// `to` lies in a lower layer of overlayfs, where it cannot be renamed.
static inline bool folder_replace(const char *from, const char *to, Error *err) {
    if (rename(from, to) == 0) return true;  // there was nothing, or an empty folder
    bool taken = errno == ENOTEMPTY || errno == EEXIST || errno == ENOTDIR;
    const unsigned exchange = 2;  // RENAME_EXCHANGE
    if (taken && syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, exchange) == 0)
        return true;
    char aside[PATH_MAX];  // a file system that cannot swap: in three steps
    if (taken && path_print(aside, err, "%s.old", from) && rename(to, aside) == 0) {
        if (rename(from, to) == 0) {
            if (rename(aside, from) != 0)
                fprintf(stderr, "note: what was %s is now %s\n", to, aside);
            return true;
        }
        int reason = errno;
        if (rename(aside, to) != 0) {
            return error_set(err, "cannot rename %s to %s: the old one is now %s", from, to,
                             aside);
        }
        errno = reason;
    }
    int reason = errno;
    error_set(err, "cannot rename %s to %s: %s", from, to, strerror(reason));
    errno = reason;
    return false;
}

// Locks a file until this process closes any descriptor of it. Returns 1, 0 with an error
// message if another process has locked it, or -1 with one if the file system has no locks.
// On NFS the server holds the lock for all nodes; mounted with nolock, a node sees only its
// own locks. flag: the option that gave `name`.
static inline int file_lock(int fd, const char *flag, const char *name, Error *err) {
    char process[40] = "";
    struct flock whole;
    memset(&whole, 0, sizeof whole);
    whole.l_type = F_WRLCK;
    whole.l_whence = SEEK_SET;
    if (fcntl(fd, F_SETLK, &whole) == 0) return 1;
    if (errno != EAGAIN && errno != EACCES) {
        error_set(err, "%s cannot be locked (%s): see to it that no other run writes to it",
                  name, strerror(errno));
        return -1;
    }
    if (fcntl(fd, F_GETLK, &whole) == 0 && whole.l_type != F_UNLCK && whole.l_pid > 0)
        snprintf(process, sizeof process, ", process %ld", (long)whole.l_pid);
    return error_set(err,
                     "%s is in use by another run%s: give this one another %s, or wait for "
                     "that one to end",
                     name, process, flag);
}

// Locks the folder of --out by a file .lock. The file stays, and nothing is ever written to
// it, because it may belong to the user. *lock is its descriptor. If the file system has no
// locks, *lock is -1 and err says why. False with an error message if another process has
// locked it.
static inline bool folder_lock(const char *dir, int *lock, Error *err) {
    char path[PATH_MAX];
    *lock = -1;
    if (!path_print(path, err, "%s/.lock", dir)) return false;
    int fd = open(path, O_RDWR | O_CREAT | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0)
        return error_set(err, "cannot open %s: %s", path,
                         errno == ELOOP ? "it is a symbolic link" : strerror(errno));
    int locked = file_lock(fd, "--out", dir, err);
    if (locked == 1)
        *lock = fd;
    else
        close(fd);
    return locked != 0;
}

// Locks the folder again if its lock file was removed or replaced, as by rm -r. Without
// that, the old lock would keep no other run out. False with an error message if another
// process has it now.
static inline bool folder_keep_lock(const char *dir, int *lock, Error *err) {
    char path[PATH_MAX];
    struct stat mine, there;
    if (!path_print(path, err, "%s/.lock", dir)) return false;
    if (*lock < 0 || (fstat(*lock, &mine) == 0 && lstat(path, &there) == 0 &&
                      mine.st_dev == there.st_dev && mine.st_ino == there.st_ino))
        return true;
    close(*lock);
    printf(
        "note: the lock of %s was removed or replaced: another run may have saved there\n",
        dir);
    return folder_lock(dir, lock, err);
}

#endif
