#!/usr/bin/env bash
# run_lessons.sh: the four trainers are lessons, and these numbers keep them so: the length of each, how many lines the
# diff to the one before has, where the mathematics begins, and that tensor parallelism changes nothing of a layer but
# what communication hands over. `make lessons` shows these diffs. Ends with `N passed, N failed`.
set -u
cd "$(dirname "$0")/../.." || exit 1
. dev/test/report.sh
export LC_ALL=C.UTF-8  # a line's length is in characters

at_most() {  # at_most VALUE BOUND NAME
    [ "$1" -le "$2" ]
    report $? "$3: $1, at most $2"
}

# ---- lengths --------------------------------------------------------------------------------------------------------

at_most "$(wc -l <train_gpt.cu)" 240 'lines of train_gpt.cu'
at_most "$(wc -l <train_gpt_tp.cu)" 420 'lines of train_gpt_tp.cu'
at_most "$(wc -l <train_gpt_pp.cu)" 600 'lines of train_gpt_pp.cu'
at_most "$(wc -l <train_gpt_3d.cu)" 690 'lines of train_gpt_3d.cu'
at_most "$(diff train_gpt.cu train_gpt_tp.cu | wc -l)" 400 'lines of the diff that adds tensor parallelism'
at_most "$(diff train_gpt_tp.cu train_gpt_pp.cu | wc -l)" 370 'lines of the diff that adds pipelines'
at_most "$(diff train_gpt_pp.cu train_gpt_3d.cu | wc -l)" 150 'lines of the diff that adds data parallelism'
begin=$(grep -n -m1 '^static void layer_forward(' train_gpt.cu | cut -d: -f1)
at_most "${begin:-9999}" 120 'line of train_gpt.cu at which the mathematics begins (layer_forward)'

mapfile -t sources < <(find . -path ./build -prune -o -type f -regex '.*\.\(c\|h\|cu\|cuh\)' -print)
long=$(grep -nE '^.{121,}' "${sources[@]}" | cut -d: -f1,2)
[ ${#sources[@]} -gt 50 ] && [ -z "$long" ]
report $? "no line of ${#sources[@]} C and CUDA files has more than 120 columns${long:+, but ${long//$'\n'/, }}"
mapfile -t headers < <(find llmc -name '*.h' -o -name '*.cuh')
long=$(for header in "${headers[@]}"; do echo "$(wc -l <"$header") $header"; done | awk '$1 > 355 { print $2 ": " $1 }')
[ ${#headers[@]} -gt 20 ] && [ -z "$long" ]
report $? "no header of ${#headers[@]} in llmc/ has more than 355 lines${long:+, but ${long//$'\n'/, }}"

# ---- a layer --------------------------------------------------------------------------------------------------------

# body FILE FUNCTION: its statements, one a line, without comments and without the breaks that the line width asked for.
body() {
    sed -n "/^static void $2(/,/^}/p" "$1" | sed 's|//.*||' | tr '\n' ' ' | tr -s ' ' | sed 's/\([;{}]\) */\1\n/g'
}

# What tensor parallelism hands over, by the names of train_gpt.cu: f's output for the layernorm's, the sums over the
# ranks for the projection and for dnorm, g's gathered gradient for dresidual, the rows of this rank for all rows. Under
# sequence parallelism a layernorm sees the rows of one rank, so the bias that it sums elsewhere is summed by a kernel.
handed_over='s/ Nl = local_rows(m, N),//; s/\<Nl\>/N/g; s/m->reduced\>/m->proj/g; s/m->dreduced\>/m->dnorm/g
             s/\([ (]\)ln\([12]\)\>/\1a->ln\2/g'
# A call of g around another one is taken off it, so that what stands inside is compared.
unwrapped='s/g_backward(m, \(dropout_backward(.*)\))/\1/'

# What a backward by halves adds to a statement, and the names of what it keeps.
halves='s/^if (input) //; s/^if (weights) //; s/if (recompute_gelu && weights)/X/; s/ \&\& weights)/)/; s/bool input = .*//
        s/weights ? \(f_again_begin([^)]*)\) : NULL/\1/
        s/output_gradient(m, \([A-Z_]*\), l, [^)]*)/g_backward(m, dropout_backward(m, \1, l, dresidual, m->proj, Nl))/
        s/g->d\(fch\|qkv\)\>/m->d\1/g; s/LayerGrads \*g, //; s/, bool add, int half)/, bool add)/'

operators='\b[fg]_(forward|backward|again)[a-z_]*\('

for function in layer_forward layer_backward; do
    difference=
    # A statement that calls f or g is inserted; the others must be those of train_gpt.cu, in their order.
    [ "$(body train_gpt.cu $function | wc -l)" -gt 10 ] &&
        difference=$(diff <(body train_gpt.cu $function) \
                          <(body train_gpt_tp.cu $function | sed "$unwrapped" | grep -vE "$operators" | sed "$handed_over"))
    report $? "train_gpt_tp.cu: f and g are inserted into $function, and nothing else changes but what they hand over"
    [ -z "$difference" ] || sed 's/^/  | /' <<<"$difference"
    [ "$(body train_gpt_pp.cu $function)" = "$(body train_gpt_3d.cu $function)" ]
    report $? "train_gpt_3d.cu: $function is that of train_gpt_pp.cu"
    # In train_gpt_pp.cu a backward can be done by halves: each statement says which, and is else that of train_gpt_tp.cu.
    difference=$(diff <(body train_gpt_tp.cu $function) <(body train_gpt_pp.cu $function | sed "$halves" | grep .))
    report $? "train_gpt_pp.cu: $function is that of train_gpt_tp.cu, but for the half to which a statement belongs"
    [ -z "$difference" ] || sed 's/^/  | /' <<<"$difference"
done
# Two halves of a layer: f before each and g behind it; in backward g, f in two parts, f's output again in two parts.
for row in 'layer_forward 4' 'layer_backward 10'; do
    read -r function want <<<"$row"
    inserted=$(body train_gpt_tp.cu "$function" | grep -cE "$operators")
    [ "$inserted" = "$want" ]
    report $? "train_gpt_tp.cu: $inserted calls of f and g in $function, $want expected"
done

finish
