// fuzz.c: the entry of libFuzzer. FUZZ_TARGET names the target; without it the program lists
// them.
#include "dev/fuzz/targets.h"

static const FuzzTarget *target;

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    const char *name = getenv("FUZZ_TARGET");
    for (int i = 0; i < FUZZ_TARGET_COUNT; i++) {
        if (!name)
            printf("%s %zu %d\n", FUZZ_TARGETS[i].name, FUZZ_TARGETS[i].longest,
                   FUZZ_TARGETS[i].leaks);
        else if (strcmp(name, FUZZ_TARGETS[i].name) == 0) target = &FUZZ_TARGETS[i];
    }
    if (target) return 0;
    fflush(stdout);
    _exit(name ? 2 : 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    target->call(data, size);
    return 0;
}
