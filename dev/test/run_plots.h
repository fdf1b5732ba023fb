// run_plots.h: runs the programs of dev/plot in a process of their own, as tests do.
//
// defines: run, run_output, and what programs.h and pictures.h define
#ifndef DEV_TEST_RUN_PLOTS_H
#define DEV_TEST_RUN_PLOTS_H

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dev/plot/programs.h"
#include "dev/test/pictures.h"

static const char *run_output = "/dev/null";  // receives what a program prints

// Runs a program with arguments, separated by spaces, and returns its exit code.
__attribute__((format(printf, 2, 3))) static int run(int (*program)(int, char **),
                                                     const char *format, ...) {
    char line[2048], *argv[32] = {0};
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    int argc = 0, status;
    for (char *word = strtok(line, " "); word && argc < 31; word = strtok(NULL, " "))
        argv[argc++] = word;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        // No picture of a test is larger, or takes longer.
        struct rlimit limit = {20 << 20, 20 << 20};
        setrlimit(RLIMIT_FSIZE, &limit);
        alarm(20);
        if (!freopen("/dev/null", "w", stderr) || !freopen(run_output, "w", stdout)) _exit(99);
        int code = program(argc, argv);
        fflush(NULL);
        _exit(code);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
    return WEXITSTATUS(status);
}

#endif
