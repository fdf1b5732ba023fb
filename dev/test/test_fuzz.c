// test_fuzz.c: gives every file of dev/fuzz/corpus/TARGET to its target of dev/fuzz/targets.h.
// They are inputs that fuzzing once found, and a sound file of each kind. Each runs in a
// process of its own, which must end well within 20 seconds.
#include "dev/fuzz/targets.h"

#include <sys/resource.h>
#include <sys/wait.h>

#include "dev/test/check.h"

// Calls the target with the file's bytes; the exit code, or -1 after a signal.
static int replay(const FuzzTarget *target, const char *path) {
    fflush(stdout);
    pid_t child = fork();
    int status;
    if (child == 0) {
        Error err;
        size_t bytes;
        struct rlimit limit = {20 << 20, 20 << 20};
        alarm(20);
        setrlimit(RLIMIT_FSIZE, &limit);
        char *data = file_read(path, 1 << 20, &bytes, &err);
        if (!data || !freopen("/dev/null", "w", stdout)) _exit(1);
        if (!getenv("FUZZ_LOUD") && !freopen("/dev/null", "w", stderr)) _exit(1);
        // Nothing is behind it that could hide a read too far.
        uint8_t *exact = (uint8_t *)malloc(bytes ? bytes : 1);
        if (!exact) _exit(1);
        memcpy(exact, data, bytes);
        target->call(exact, bytes);
        _exit(0);
    }
    return child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)
               ? -1
               : WEXITSTATUS(status);
}

int main(void) {
    static Check c;
    for (int i = 0; i < FUZZ_TARGET_COUNT; i++) {
        char folder[64], path[512], bad[512] = "";
        snprintf(folder, sizeof folder, "dev/fuzz/corpus/%s", FUZZ_TARGETS[i].name);
        DIR *dir = opendir(folder);
        int files = 0, fine = 0;
        for (struct dirent *e; dir && (e = readdir(dir)) != NULL;) {
            if (e->d_name[0] == '.') continue;
            snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
            bool ok = replay(&FUZZ_TARGETS[i], path) == 0;
            files++;
            fine += ok;
            if (!ok) snprintf(bad, sizeof bad, "; not %.400s", path);
        }
        if (dir) closedir(dir);
        check(&c, files > 0 && fine == files, "%s: %d of %d files%s", FUZZ_TARGETS[i].name, fine,
              files, bad);
    }
    return check_summary(&c);
}
