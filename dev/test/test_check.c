// test_check.c: the counting of the other tests: a program that failed a check, or made none,
// must not return 0.
#include <sys/wait.h>
#include <unistd.h>

#include "dev/test/check.h"

// Returns the exit code of a program with these numbers of passed and failed checks.
static int code_of(int passes, int failures) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        Check inner = {0, 0};
        if (!freopen("/dev/null", "w", stdout)) _exit(99);
        for (int i = 0; i < passes; i++) check(&inner, true, "passes");
        for (int i = 0; i < failures; i++) check(&inner, false, "fails");
        _exit(check_summary(&inner));
    }
    int status;
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status)
               ? WEXITSTATUS(status)
               : -1;
}

int main(void) {
    Check c = {0, 0};
    check(&c, code_of(3, 0) == 0, "a program whose checks pass returns 0");
    check(&c, code_of(3, 1) == 1, "\"silent test\": one that failed a check does not");
    check(&c, code_of(0, 0) == 1, "\"silent test\": nor does one that checked nothing");
    return check_summary(&c);
}
