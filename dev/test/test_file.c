// test_file.c: the base of llmc/host: memory, files and folders.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "llmc/host/file.h"

#include <sys/wait.h>

#include "dev/test/check.h"
#include "dev/test/files.h"

static Check checks;
static char root[] = "build/test_file.XXXXXX";  // holds all files of this test

static const char *in_root(const char *name) { return in(root, name); }

// Calls `act` in a process of its own; returns its exit code (-1: a signal) and copies the start
// of its stderr.
static int run(void (*act)(void), char *said, size_t size) {
    int ends[2], status;
    if (pipe(ends) != 0) exit(1);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        act();
        _exit(0);
    }
    close(ends[1]);
    size_t n = 0;
    for (ssize_t got; n + 1 < size && (got = read(ends[0], said + n, size - 1 - n)) > 0;)
        n += (size_t)got;
    said[n] = '\0';
    close(ends[0]);
    if (child < 0 || waitpid(child, &status, 0) != child) exit(1);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// The address sanitizer's allocator returns NULL like libc's, and does not end the program
// itself.
const char *__asan_default_options(void) { return "allocator_may_return_null=1"; }

static volatile size_t half = SIZE_MAX / 2 + 2;  // not known when the compiler checks sizes

static void allocate_too_much(void) { free(host_alloc(half, 4)); }
static void resize_too_much(void) { free(host_resize(NULL, half, 2)); }

static void test_memory(void) {
    static const char sentence[] = "error: out of host memory: no room for 9223372036854775809 x ";
    char said[512];
    int code = run(allocate_too_much, said, sizeof said);
    check(&checks, code == 1 && strncmp(said, sentence, strlen(sentence)) == 0,
          "a size that is no size_t ends the program: %.*s", (int)strcspn(said, "\n"), said);
    code = run(resize_too_much, said, sizeof said);
    check(&checks, code == 1 && strncmp(said, sentence, strlen(sentence)) == 0,
          "also of memory that grows");
    char *none = host_alloc(0, 8), *text = host_string("text");
    text = host_resize(text, 100, 1);
    check(&checks, none && strcmp(text, "text") == 0,
          "no object at all is memory too, and what grows keeps its content");
    free(none);
    free(text);
}

static void test_errors(void) {
    Error err;
    error_set(&err, "no flag '%s'", "--a\nerror: \033[2J\177\303\251");
    check(&checks, strcmp(err.text, "no flag '--a?error: ?[2J?\303\251'") == 0,
          "control characters of what is quoted become '?': %s", err.text);
}

static void make_in_sealed(void) {
    Error err = {""};
    if (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0)
        _exit(3);  // nothing is sealed for root
    if (!folder_make(in_root("sealed/out"), &err)) fprintf(stderr, "%s", err.text);
}

static void test_folders(void) {
    char said[512];
    bool made = chmod(root, 0755) == 0 && mkdir(in_root("sealed"), 0555) == 0;
    int code = run(make_in_sealed, said, sizeof said);
    check(&checks, made && code == 0 && strstr(said, "Permission denied"),
          "the reason why there is no folder: %s", said);
}

int main(void) {
    if (!mkdtemp(root)) die("cannot make", root);
    test_memory();
    test_errors();
    test_folders();
    remove_tree(root);
    return check_summary(&checks);
}
