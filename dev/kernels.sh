#!/usr/bin/env bash
# kernels.sh: prints a program that includes every kernel of llmc/, for `make spills` and `make sass`: its launching
# functions make every instance of a template that is ever launched.
set -euo pipefail
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."

for header in llmc/kernels/*.cuh; do echo "#include \"$header\""; done
# Launching functions that are templates themselves are made by taking their addresses.
echo 'void *addresses[] = {'
for norm in NORM_LAYER NORM_RMS NORM_1P; do
    for function in layernorm_forward layernorm_residual_forward residual_forward layernorm_backward; do
        echo "    (void *)&$function<$norm>,"
    done
done
echo '    (void *)&columns_move<false, floatX, floatX>,'
echo '    (void *)&columns_move<false, floatX, float>, (void *)&columns_move<true, float, float>};'
