#!/usr/bin/env bash
# together.sh TRAINER.cu...: prints one source with all these trainers, each in a namespace of its
# name. The program runs the trainer whose name it has, so it needs a link for each. `make test`
# compiles this, because most of a trainer is kernels and headers that all trainers have.
# dev/test/run_lessons.sh compiles each by itself.
set -euo pipefail

printf '#include <%s>\n' stdio.h string.h
# Before the namespaces, so that within them the headers are there already.
cat "$@" | grep '^#include' | awk '!seen[$0]++'
for file in "$@"; do
    name=${file##*/}
    echo "namespace ${name%.cu} {"
    echo "#line 1 \"$file\""
    sed 's/^#include .*//' "$file"
    echo '}'
done
echo 'int main(int argc, char **argv) {'
echo "    const char *slash = strrchr(argv[0], '/'), *name = slash ? slash + 1 : argv[0];"
for file in "$@"; do
    name=${file##*/}
    name=${name%.cu}
    echo "    if (strcmp(name, \"$name\") == 0) return $name::main(argc, argv);"
done
cat <<'END'
    fprintf(stderr, "error: %s is all trainers in one and must have the name of one of them: `make "
                    "clean` and `make` build each by itself\n", name);
    return 2;
}
END
