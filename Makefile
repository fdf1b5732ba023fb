# Trains GPT-2 with tensor, pipeline and data parallelism, on GPUs or without any. `make help` lists
# the targets.
#
#   make DEVICE=cpu|cuda      default: cuda if there are nvcc and a GPU
#        PRECISION=fp32|bf16  default: bf16 on cuda, fp32 on cpu
#        SANITIZE=1           cpu only: address and undefined-behaviour sanitizers
#        GDB=1                cpu only: nothing optimised, for a debugger to see lines and variables
#        GPU_SHAPES=1         cpu only: divides rows and threads of kernels as on a GPU: slow here
#        GPU_QUEUE=1          cpu only: a thread carries NCCL's calls, as with NCCL=mpi on a GPU
#        PROFILE=1            times each kernel and product: a table at the end of runs with --trace
#        TUNE=1               times cuBLASLt's algorithms for each product: see make tune
#        NCCL=nccl|mpi        cuda only: mpi carries NCCL's calls, so that ranks can share a GPU
#        MPI=openmpi|mpich    the one to take where both are installed (mpicxx.mpich, mpirun.mpich)
#        V=1                  shows the commands that compile
#        LAYOUT='--tensor 2'  more flags for `make train`; its sizes say how many ranks are started
#        RESUME=1             `make train` goes on from the newest checkpoint, after Ctrl-C
#        ONLY=pattern         `make test` builds and runs only what has the pattern in its title
#
# All output goes to build/, each combination to a folder of its own: build/cpu-fp32/train_gpt.

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
JOBS := $(shell nproc 2>/dev/null || echo 2)
# A recipe that calls make with all cores, unless the user chose -j.
PARALLEL = $(MAKE) --no-print-directory $(if $(findstring jobserver,$(MAKEFLAGS)),,-j$(JOBS))

comma := ,
ifndef NVCC
NVCC := $(or $(shell command -v nvcc 2>/dev/null),$(wildcard /usr/local/cuda/bin/nvcc))
endif
ifndef DEVICE
DEVICE := $(if $(NVCC),$(if $(shell nvidia-smi -L 2>/dev/null | grep GPU),cuda,cpu),cpu)
endif
PRECISIONS := $(or $(PRECISION),fp32 bf16)  # of make kernels and make bench
PRECISION ?= $(if $(filter cuda,$(DEVICE)),bf16,fp32)
NCCL ?= $(if $(NCCL_LIBS),nccl,mpi)
KNOWN := $(and $(filter cpu cuda,$(DEVICE)),$(filter fp32 bf16,$(PRECISION)),\
               $(filter nccl mpi,$(NCCL)))
ifndef KNOWN
$(error DEVICE must be cpu or cuda, PRECISION fp32 or bf16, NCCL nccl or mpi)
endif
ifeq ($(DEVICE)$(NVCC),cuda)
$(error DEVICE=cuda needs nvcc in PATH or NVCC=/path/to/nvcc)
endif
ifeq ($(DEVICE)$(SANITIZE),cuda1)
$(error SANITIZE=1 is for DEVICE=cpu)
endif
ifeq ($(DEVICE)$(GDB),cuda1)
$(error GDB=1 is for DEVICE=cpu)
endif
VARIANT := $(MPI) $(if $(SANITIZE),asan) $(if $(GDB),gdb) $(if $(PROFILE),profile) \
    $(if $(TUNE),tune) $(if $(GPU_SHAPES),shapes) $(if $(GPU_QUEUE),queue)
DIR := build/$(DEVICE)-$(PRECISION)$(subst $(eval) ,,$(addprefix -,$(VARIANT)))

# ---- what there is to build ----------------------------------------------------------------------

TRAINERS := $(wildcard train_gpt.cu train_gpt_tp.cu train_gpt_pp.cu train_gpt_3d.cu)
LESSONS := $(wildcard dev/lessons/*.cu)  # trainers that branch off these
KERNELS := $(wildcard dev/cuda/*.cu)
TOOLS := $(wildcard dev/data/*.c dev/plot/*.c dev/scale/*.c)
program = $(addprefix $(DIR)/,$(basename $(1)))

# ---- libraries -----------------------------------------------------------------------------------
# dev/probe.sh finds libraries by linking small programs. The build stops if one is missing, and
# dev/setup.sh installs it. The answer is kept; only missing libraries are looked for again at the
# next call.

PROBE := build/probe-$(DEVICE)$(addprefix -,$(MPI)).mk
PROBED = $(DEVICE) '$(if $(filter cuda,$(DEVICE)),$(NVCC),$(CXX))' '$(CC)' $(MPI)
PUZZLE_COMMANDS := puzzle-check puzzle-hint puzzle-diff puzzle-give-up puzzle-again \
    puzzle-refresh detective detective-answer detective-hint detective-give-up break
# These compile nothing, or call make again to compile.
NEED_NO_LIBRARY := help setup clean train test lessons kernels bench sass asm ptx gpu-check \
    explorer site release fuzz soak reproduce puzzles puzzle $(PUZZLE_COMMANDS)
ifneq ($(filter-out $(NEED_NO_LIBRARY),$(or $(MAKECMDGOALS),all)),)
include $(PROBE)
ifneq ($(strip $(MISSING)),)
$(shell rm -f $(PROBE))
$(error not found: $(MISSING); `make setup` installs what is missing)
endif
ifeq ($(MAKELEVEL),0)
ifdef FOUND
$(info $(DIR): found $(FOUND)$(if $(strip $(WITHOUT)),; without $(WITHOUT)))
endif
endif
endif

$(PROBE): dev/probe.sh
	@mkdir -p $(@D)
	@dev/probe.sh $(PROBED) > $@.tmp && mv $@.tmp $@

# ---- how it is compiled --------------------------------------------------------------------------
# Never -ffast-math. No contraction to fused multiply-add on the host, so that the same source gives
# the same bits in every program. Nothing reads errno or floating-point flags: without them roots
# and selects become vectors, with the same results.

WARNINGS := -Wall -Wextra
# Programs that train on a CPU are compiled to run fast; tests, bf16 and the GPU's shapes and queue,
# which only check, to compile fast. Null pointers and the sizes of objects are left to the address
# sanitizer, which sees them too.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize=null,object-size,vptr \
    -fno-sanitize-recover=all
QUICK := $(if $(SANITIZE),-Og -g1 $(SANITIZERS),-O1 -ftree-vectorize)
CHECKS_ONLY := $(SANITIZE)$(GPU_SHAPES)$(GPU_QUEUE)$(TUNE)$(filter bf16,$(PRECISION))
OPTIMIZE := $(if $(CHECKS_ONLY),$(QUICK),-O3) $(if $(GDB),-O0 -g)
$(DIR)/dev/test/% $(DIR)/dev/puzzles/% $(DIR)/test_gpt: OPTIMIZE := $(QUICK)
# These run for a tenth of a second, which is less than optimising them takes.
BRIEF := $(addprefix $(DIR)/dev/test/test_,work fuzz profile cost plot)
$(BRIEF): OPTIMIZE := $(if $(SANITIZE),$(QUICK),-O0)
# Trainers run the tensor-core kernels on a CPU only in tests, with small heads; dev/cuda has all
# capacities.
FEW := $(if $(filter cpu,$(DEVICE)),-DATTENTION_MMA_CAPACITIES=64)
ARITHMETIC := -ffp-contract=off -fno-math-errno -fno-trapping-math
HOST = $(OPTIMIZE) $(NATIVE) $(ARITHMETIC) $(OPENMP)
# The commit at which a program is built, for its --version: nothing is built again only because it
# changed.
VERSION := $(shell git describe --always --dirty 2>/dev/null || echo unknown)
DEFINES := -DVERSION='"$(VERSION)"' -DPRECISION_$(if $(filter bf16,$(PRECISION)),BF16,FP32) \
    $(if $(PROFILE),-include dev/cuda/kernel_times.cuh) \
    $(if $(TUNE),-include dev/cuda/tune.cuh) \
    $(if $(GPU_SHAPES),-DGPU_SHAPES) $(if $(GPU_QUEUE),-DGPU_QUEUE -Idev/test/gpu)
$(DIR)/train_% $(DIR)/dev/test/%: DEFINES += $(FEW)
HOST_LIBS = -Xlinker --as-needed $(CJSON_LIBS) $(PCRE2_LIBS)
LIBS := $(HOST_LIBS) $(BLAS_LIBS) $(MPI_LIBS)
DEPENDENCIES = -MMD -MP -MF $@.d -MT $@
# A program is said by its name; V=1 shows the command. `make test` says the time left, too.
SAY = $(if $(V),,@$(if $(TESTING),dev/test/run_tests.sh --building,echo) '$@';)

ifeq ($(DEVICE),cpu)
CU = $(CXX) -x c++ -std=c++17 $(HOST) $(WARNINGS) -Illmc/cpu -Illmc/mpi -I. \
     $(DEFINES) $(BLAS_DEFINES) $(MPI_FLAGS)
else
# H100, H200 and GH200 run sm_90a, with the instructions that only they have; later GPUs
# compile compute_90.
ARCHITECTURES := -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a \
    -gencode arch=compute_90,code=compute_90
NVCC_HOST := $(subst $(eval) ,$(comma),$(strip $(NATIVE) -ffp-contract=off $(OPENMP) $(WARNINGS)))
CU = $(NVCC) -std=c++17 -O3 $(ARCHITECTURES) -diag-suppress 177 -Xcompiler $(NVCC_HOST) -I. \
     $(DEFINES) $(MPI_FLAGS)
ifeq ($(NCCL),mpi)
CU += -Illmc/mpi
else
LIBS += $(NCCL_LIBS)
endif
endif
C = $(CC) -std=gnu11 $(HOST) $(WARNINGS) -DVERSION='"$(VERSION)"' -I.

$(DIR)/%: %.cu Makefile $(PROBE)
	@mkdir -p $(@D)
	$(SAY)$(CU) $(DEPENDENCIES) -o $@ $< $(LIBS)

$(DIR)/%: dev/lessons/%.cu Makefile $(PROBE)
	@mkdir -p $(@D)
	$(SAY)$(CU) $(DEPENDENCIES) -o $@ $< $(LIBS)

$(DIR)/%: %.c Makefile $(PROBE)
	@mkdir -p $(@D)
	$(SAY)$(C) $(DEPENDENCIES) -o $@ $< $(HOST_LIBS) -lm

# Tools have no device and no precision.
build/tools/%: dev/data/%.c Makefile $(PROBE)
	@mkdir -p $(@D)
	$(SAY)$(C) $(DEPENDENCIES) -o $@ $< $(HOST_LIBS) -lm

build/tools/%: dev/plot/%.c Makefile $(PROBE)
	@mkdir -p $(@D)
	$(SAY)$(C) $(DEPENDENCIES) -o $@ $< $(HOST_LIBS) -lm

build/tools/%: dev/scale/%.c Makefile $(PROBE)
	@mkdir -p $(@D)
	$(SAY)$(C) $(DEPENDENCIES) -o $@ $< $(HOST_LIBS) -lm

# The planner has the bf16 trainer in it.
build/tools/plan: DEFINES := -DVERSION='"$(VERSION)"' -DPRECISION_BF16 $(FEW)
build/tools/plan: dev/plan/plan.cu Makefile $(PROBE)
	@mkdir -p $(@D)
	$(SAY)$(CXX) -x c++ -std=c++17 -O1 $(NATIVE) $(ARITHMETIC) $(OPENMP) \
	    $(WARNINGS) -Wno-unused-function -Illmc/cpu -Illmc/mpi -I. $(DEFINES) $(BLAS_DEFINES) \
	    $(MPI_FLAGS) $(DEPENDENCIES) -o $@ $< $(LIBS)

-include $(wildcard $(DIR)/*.d $(DIR)/dev/*/*.d $(DIR)/puzzles/*/*.d $(DIR)/build/puzzles/*/*.d \
    build/tools/*.d)

# ---- targets -------------------------------------------------------------------------------------

.PHONY: all trainers kernel-programs kernels bench sass asm ptx tools scale scale-trainers holmes \
        calibrate tune setup train test lessons gpu-check clean help explorer site release corpus \
        run-train build-train doc plan planned schedule study fuzz soak build-soak reproduce \
        bubbles planned-fp32 planned-bf16 planned-asan planned-shapes planned-queue \
        planned-profile planned-tune experts puzzles puzzle $(PUZZLE_COMMANDS)

all:  ## every trainer and tool, with all cores; says what it built
	+@$(PARALLEL) trainers tools
	@echo "built: $(words $(TRAINERS) $(LESSONS)) trainers in $(DIR)," \
	    "$(words $(TOOLS)) tools in build/tools"
	@echo "next: make train, which trains a small model; $(DIR)/train_gpt --help; make help"
trainers: $(call program,$(TRAINERS) $(notdir $(LESSONS)))
trainers:  ## build/cpu-fp32/train_gpt and those after it
kernel-programs: $(call program,$(KERNELS))  ## the kernel laboratory, dev/cuda, compiled only
tools: $(addprefix build/tools/,$(notdir $(basename $(TOOLS))))
tools:  ## data preparation and plots: build/tools
setup:  ## installs what is missing (compiler, MPI, oneDNN, cJSON, PCRE2)
	@dev/setup.sh $(PROBED)

clean:  ## removes build/
	rm -rf build

# make train and make test first; then in the order of this file.
help:  ## this list
	@echo 'usage: make [TARGET] [DEVICE=cpu|cuda] [PRECISION=fp32|bf16] [SANITIZE=1|GDB=1];' \
	    'here DEVICE is $(DEVICE)'
	@for first in '^(train|test):' '^[a-z-]+:'; do \
	        sed -nE "/$$first/s/^([a-z-]+):.*## */\1|/p" Makefile; \
	    done | \
	    awk -F'|' '!seen[$$1]++ {printf "  %-16s %s\n", $$1, $$2}'

TARGETS = $(shell sed -nE 's/^([a-z-]+):.*\#\# .*/\1/p' Makefile)
.DEFAULT:
	@case '$@' in build/*) echo "make: there is no rule for '$@' with programs in $(DIR)/:" \
	    'DEVICE, PRECISION and SANITIZE choose that folder, and names are those of the sources' \
	    >&2; exit 2;; esac
	@near=$$(dev/nearest.sh '$@' $(TARGETS)); \
	    echo "make: there is no target '$@':$${near:+ did you mean \`make $$near\`?}" \
	        '`make help` lists all targets' >&2; \
	    exit 2

# ---- the kernel laboratory -----------------------------------------------------------------------

define build-kernels
	@dev/setup.sh $(PROBED)
	@for precision in $(PRECISIONS); do \
	    $(PARALLEL) DEVICE=$(DEVICE) PRECISION=$$precision kernel-programs || exit 1; done
endef

kernels:  ## checks every kernel of dev/cuda in both precisions: a row for each
	$(build-kernels)
	@dev/cuda/run.sh check $(DEVICE) $(PRECISIONS)

bench:  ## times every kernel beside the measured roofline; on a CPU PyTorch too (PEER=python3)
	$(build-kernels)
	@dev/cuda/run.sh bench $(DEVICE) $(PRECISIONS)
ifeq ($(DEVICE),cpu)
	+@$(PARALLEL) DEVICE=cpu PRECISION=fp32 build/cpu-fp32$(addprefix -,$(MPI))/train_gpt
	@python3 dev/cpu_speed.py build/cpu-fp32$(addprefix -,$(MPI))
endif

# Trainers find the file and use it. On a CPU this only rehearses: it writes to build/out.
TUNED ?= --model d12 --max-seq 1024 --seq 1024 --micro-batch 64 --global-batch 64
tune: corpus
tune:  ## times cuBLASLt's first 8 algorithms for each product of a step: build/gemm-GPU.json
	+@$(MAKE) --no-print-directory TUNE=1 $(DIR)-tune/train_gpt
ifeq ($(DEVICE),cuda)
	@$(DIR)-tune/train_gpt --train-data build/corpus/train.bin --steps 1 $(TUNED)
else
	@mkdir -p build/out && cd build/out && ../../$(DIR)-tune/train_gpt --steps 1 \
	    --train-data ../corpus/train.bin --layers 1 --heads 2 --channels 64 --seq 64
endif

sass:  ## registers, spills and inner loops of kernels for sm_80 and sm_90a, and their budgets
	@NVCC=$(NVCC) python3 dev/sass.py

asm:  ## vector and scalar instructions of each kernel's hot loop on a CPU (g++, objdump)
	@python3 dev/asm.py

ptx:  ## runs what nvcc compiles in an interpreter that checks every access (nvcc, numpy; no GPU)
	+@$(MAKE) --no-print-directory DEVICE=cpu PRECISION=bf16 \
	    build/cpu-bf16/dev/ptx_attention build/cpu-bf16/dev/ptx_cases
	+@$(MAKE) --no-print-directory DEVICE=cpu PRECISION=fp32 build/cpu-fp32/dev/ptx_cases
	@NVCC=$(NVCC) dev/test/run_ptx.sh all

gpu-check:  ## one command for a machine with a GPU: checks, tokens/s and MFU, kernels, PyTorch
	dev/gpu_check.sh

# The published runs, and the cluster of each group.
SCALE_RUNS := dev/scale/rows_a100.csv dev/scale/rows_more.csv dev/scale/rows_later.csv \
    dev/scale/rows_fsdp.csv dev/scale/rows_vtrain.csv dev/scale/rows_nemotron.csv \
    dev/scale/rows_bloom.csv \
    dev/clusters/jean-zay.json:bloom dev/clusters/vtrain-a100.json:vts \
    dev/clusters/selene-2021.json:ptd-,mtnlg- \
    dev/clusters/selene-2022.json:kor-,nemo2208,nemo2211-5b \
    dev/clusters/roce-a100.json:zb- dev/clusters/selene-2020.json:mlm2020-dgxa100,mlm2020-selene \
    dev/clusters/dgx-a100.json:llmc-124M,llmc-350M,llmc-774M dev/clusters/dgx-h100.json:llmc-1558M \
    dev/clusters/eos-2025.json:eos,dgxc dev/clusters/foundry-a100-80.json:mpt-a100-80 \
    dev/clusters/foundry-a100-40.json:mpt-a100-40 dev/clusters/foundry-h100.json:mpt-h100

scale: build/tools/scale
scale:  ## published runs on up to 3360 GPUs: predicted step time, published, error
	@build/tools/scale $(SCALE_RUNS)

holmes: build/tools/scale
holmes:  ## rates of Holmes, on InfiniBand, RoCE and Ethernet, beside the light simulation's
	@dev/scale/holmes.sh

# On a GPU, the laboratory's rows are the measurement; network and host stay those of a DGX H100.
calibrate:  ## measures a cluster file of this machine: build/laptop.json, on a GPU build/gpu.json
ifeq ($(DEVICE),cuda)
	@$(MAKE) --no-print-directory DEVICE=cuda PRECISION=bf16 bench
	@memory=$$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -1); \
	python3 dev/scale/calibrate_gpu.py gpu build/bench-cuda.jsonl dev/clusters/dgx-h100.json \
	    memory $${memory}e6 'nvidia-smi' > build/gpu.json
	@echo 'written: build/gpu.json, for --virtual-time and --simulate'
else
	@$(MAKE) --no-print-directory DEVICE=cpu PRECISION=fp32 corpus build/cpu-fp32/train_gpt
	@$(MAKE) --no-print-directory DEVICE=cpu PRECISION=fp32 PROFILE=1 build/cpu-fp32-profile/train_gpt
	@dev/scale/calibrate.sh build/cpu-fp32 build/corpus/train.bin
endif

scale-trainers: build/tools/scale
scale-trainers:  ## the same runs simulated by train_gpt_3d, train_fsdp and train_llama (minutes)
	@$(MAKE) --no-print-directory DEVICE=cpu PRECISION=bf16 \
	    build/cpu-bf16/train_gpt_3d build/cpu-bf16/train_fsdp build/cpu-bf16/train_llama
	@build/tools/scale --trainers build/cpu-bf16 $(SCALE_RUNS)

# ---- make plan -----------------------------------------------------------------------------------

CLUSTER ?= dgx-a100
GPUS ?= 1024
BATCH ?= 1536
MODEL ?= gpt3-175b
PLAN ?=
plan: build/tools/plan
plan:  ## the fastest layouts: MODEL=gpt3-175b CLUSTER=dgx-a100 GPUS=1024 BATCH=1536 PLAN='flags'
	@build/tools/plan --model $(MODEL) --cluster $(CLUSTER) --gpus $(GPUS) --batch $(BATCH) $(PLAN)

study: build/tools/study
study:  ## PTD-P's figures 11 to 18 by simulation, beside what was published: build/study/*.svg
	@mkdir -p build/study
	@build/tools/study dev/scale/rows_a100.csv build/study

# ---- the built-in corpus: this repository's own text, as bytes -----------------------------------

CORPUS_TEXT := $(sort $(wildcard README.md *.cu *.c) \
                 $(shell find llmc dev doc -type f \
                         \( -name '*.c' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \
                         -o -name '*.sh' -o -name '*.py' -o -name '*.md' \) 2>/dev/null))

corpus: build/corpus/train.bin  ## build/corpus/train.bin and val.bin
build/corpus/train.bin: build/tools/byte_corpus $(CORPUS_TEXT)
	@mkdir -p $(@D)
	@build/tools/byte_corpus $@ build/corpus/val.bin $(CORPUS_TEXT)

# ---- make train ----------------------------------------------------------------------------------

# After Ctrl-C the ranks save, and the last line is dev/train.sh's: the shell waits for it.
train:  ## set-up, build, and train a small model on the built-in corpus; RESUME=1 goes on
	@dev/setup.sh $(PROBED)
	+@$(PARALLEL) DEVICE=$(DEVICE) build-train
	+@trap : INT; $(MAKE) --no-print-directory DEVICE=$(DEVICE) run-train || [ $$? = 130 ]

MAIN := $(lastword $(TRAINERS))
LAYOUT ?= $(if $(filter %_3d.cu,$(MAIN)),--tensor 2 --data 2 --pipeline 2 --virtual 2,\
          $(if $(filter %_pp.cu,$(MAIN)),--pipeline 2,$(if $(filter %_tp.cu,$(MAIN)),--tensor 2)))
# As many ranks as the sizes that LAYOUT names multiply to; they share the cores.
RANKS ?= $(shell echo '$(LAYOUT)' | awk '{ \
           n = 1; \
           for (i = 1; i < NF; i++) if ($$i ~ /^--(tensor|pipeline|data)$$/) n *= $$(i + 1); \
           print n }')
THREADS = $(shell echo $$(($(JOBS) > $(RANKS) ? $(JOBS) / $(RANKS) : 1)))
# After Ctrl-C Open MPI waits that long before it ends the ranks, and again before it kills them,
# which are saving. --quiet keeps away the lines with which it follows a trainer's message.
GRACE = $(if $(findstring --oversubscribe,$(MPIRUN)),--mca odls_base_sigkill_timeout 3 --quiet)
LAUNCHER = $(if $(filter 1,$(RANKS)),,OMP_NUM_THREADS=$(THREADS) $(MPIRUN) $(GRACE) -n $(RANKS))

OUT ?= build/out
TRAIN_FLAGS := --train-data build/corpus/train.bin --val-data build/corpus/val.bin --shuffle 1 \
               --layers 4 --heads 4 --channels 128 --seq 64 --micro-batch 4 --global-batch 16 \
               --steps 500 --lr 2e-3 --warmup 30 --val-every 100 \
               --sample-every 100 --sample-tokens 60 --prompt "static inline " \
               --out $(OUT) --log $(OUT)/log.jsonl --trace $(OUT)/trace.json
# The pictures are of a few steps on the virtual clock, where each rank has a device of its own;
# GPUs have a real one.
PICTURED := $(OUT)/$(if $(filter cpu,$(DEVICE)),virtual,trace).json
VIRTUAL_FLAGS := --train-data build/corpus/train.bin --shuffle 1 \
                 --layers 4 --heads 4 --channels 128 --seq 64 --micro-batch 4 --global-batch 16 \
                 --steps 5 --virtual-time dev/clusters/laptop.json --trace $(PICTURED)

build-train: $(call program,train_gpt.cu $(MAIN)) corpus tools
	@:
# The second command is the virtual clock's.
run-train: export OUT := $(OUT)
run-train: export DIR := $(DIR)
run-train: export LAYOUT := $(LAYOUT)
run-train: export RANKS := $(RANKS)
run-train: export TRACE := $(PICTURED)
run-train: export RESUME := $(RESUME)
run-train:
	@mkdir -p $(OUT)
	@exec dev/train.sh \
	    $(LAUNCHER) $(call program,$(MAIN)) $(TRAIN_FLAGS) $(LAYOUT) $(if $(RESUME),--resume auto) \
	    $(if $(filter cpu,$(DEVICE)),\
	        then $(LAUNCHER) $(call program,$(MAIN)) $(VIRTUAL_FLAGS) $(LAYOUT))

# ---- make experts --------------------------------------------------------------------------------

# A mixture of 8 experts, each on a rank of its own, and the dense model that pays as many FLOPs for
# a token: so small a one that its size is what limits it. Each has the learning rate that suits it
# (doc/course/8-experts.md).
EXPERTS := --train-data build/corpus/train.bin --val-data build/corpus/val.bin --shuffle 1 \
           --layers 2 --heads 2 --channels 32 --seq 64 --micro-batch 2 --global-batch 16 \
           --steps 3000 --warmup 60 --val-every 500 --val-batches 40
experts: corpus
experts:  ## trains 8 experts on 8 ranks, and the dense model of equal FLOPs: curves and balance
	+@$(PARALLEL) DEVICE=$(DEVICE) $(call program,train_moe train_data) \
	    build/tools/loss build/tools/experts
	@mkdir -p $(OUT)
	@rm -f $(OUT)/experts.jsonl $(OUT)/dense.jsonl
	OMP_NUM_THREADS=1 $(MPIRUN) -n 8 $(call program,train_moe) $(EXPERTS) --lr 5e-3 \
	    --expert-parallel 8 --capacity 2 --log $(OUT)/experts.jsonl
	OMP_NUM_THREADS=1 $(MPIRUN) -n 8 $(call program,train_data) $(EXPERTS) --lr 12e-3 \
	    --log $(OUT)/dense.jsonl
	@build/tools/loss --title 'Equal FLOPs' --out $(OUT)/experts-loss.svg \
	    $(OUT)/experts.jsonl $(OUT)/dense.jsonl
	@build/tools/experts --out $(OUT)/experts.svg $(OUT)/experts.jsonl
	@echo "curves       $(OUT)/experts-loss.svg"
	@echo "balance      $(OUT)/experts.svg"
	@for run in experts dense; do \
	        sed -n 's/.*"val_loss":\([0-9.]*\).*/\1/p' $(OUT)/$$run.jsonl | tail -n 1; \
	    done | xargs | \
	    awk '{ printf "8 experts end at a validation loss of %.3f, ", $$1; \
	           printf "the dense model of equal FLOPs at %.3f: ", $$2; \
	           printf "%.3f %s\n", $$1 < $$2 ? $$2 - $$1 : $$1 - $$2, $$1 < $$2 ? "less" : "more" }'

# ---- make lessons --------------------------------------------------------------------------------

lessons:  ## what each trainer adds to its parent, function by function; LESSON=tp shows one
	@dev/lessons.sh $(LESSON)

doc:  ## makes every picture and table of README.md and doc/ again, from runs (some 15 minutes)
	+@$(PARALLEL) DEVICE=cpu PRECISION=fp32 trainers tools corpus \
	    build/cpu-fp32/test_gpt build/tools/plan
	+@$(PARALLEL) DEVICE=cpu PRECISION=bf16 build/cpu-bf16/train_gpt_tp \
	    build/cpu-bf16/train_gpt_3d build/cpu-bf16/train_zero_bubble build/cpu-bf16/train_data \
	    build/cpu-bf16/train_fsdp build/cpu-bf16/train_moe build/cpu-bf16/train_gpt \
	    build/cpu-bf16/train_offload
	@dev/plot/doc.sh

# ---- make reproduce ------------------------------------------------------------------------------

reproduce:  ## 10.8 million parameters on text of a Debian package: curve, 1 and 8 ranks, PyTorch
	@dev/setup.sh $(PROBED)
	+@$(PARALLEL) DEVICE=cpu PRECISION=fp32 build/cpu-fp32/train_gpt build/cpu-fp32/train_gpt_3d \
	    build/tools/byte_corpus build/tools/loss
	@dev/reproduce.sh

# ---- make schedule -------------------------------------------------------------------------------

# A file, a list, or a schedule by its name with P stages and M micro-batches. A recipe reads the
# list from the environment, where no character of it means anything to a shell.
SCHEDULE ?= doc/schedules/zb-h1.txt
schedule: export LIST = $(value SCHEDULE)
schedule: build/tools/schedule build/tools/timeline
schedule:  ## proves or refuses SCHEDULE='F0 B0; F0 B0' or a file, and draws it
	@build/tools/schedule --list $(if $(P),--stages $(P)) $(if $(M),--micros $(M)) \
	    --trace build/schedule.json "$$LIST"
	@build/tools/timeline --out build/schedule.svg build/schedule.json 2>/dev/null
	@echo 'picture: build/schedule.svg'

bubbles: build/tools/bubbles
bubbles:  ## bubbles of every schedule on the trainers' own clock, beside formulas and the paper's
	@$(MAKE) --no-print-directory DEVICE=cpu PRECISION=bf16 \
	    build/cpu-bf16/train_gpt_3d build/cpu-bf16/train_zero_bubble
	@for table in formulas paper; do \
	    build/tools/bubbles $$table build/cpu-bf16 dev/clusters/dgx-a100.json || exit 1; echo; done
	@build/tools/bubbles v

# ---- make explorer -------------------------------------------------------------------------------

explorer:  ## doc/explorer.html: these headers in a browser (needs clang and wasm-ld)
	@dev/explorer/build.sh

site:  ## README, doc/ and the explorer as pages without external resources: site/ (needs cmark-gfm)
	@rm -rf site && python3 dev/site.py site
	@echo 'open site/index.html in a browser'

release:  ## build/release: an archive with site and explorer, of TAG=v0.1.0 or of the last commit
	@dev/release.sh $(TAG)

# ---- make puzzle ---------------------------------------------------------------------------------

puzzles:  ## puzzles: write a trainer's missing lines; minutes, stars, and which one is next
	@dev/puzzles/puzzle.sh list

puzzle:  ## begins puzzle N=5: its text, and a copy with a hole in puzzles/05
	@dev/puzzles/puzzle.sh begin '$(N)'

# An answer that is not right yet is no error of make.
puzzle-check:  ## builds the answer to puzzle N=5 and says what is right and what is not
	@dev/setup.sh cpu '$(CXX)' '$(CC)' $(MPI)
	@dev/puzzles/puzzle.sh check '$(N)' || [ $$? = 1 ]

puzzle-hint:  ## the next of the three hints of puzzle N=5
	@dev/puzzles/puzzle.sh hint '$(N)'

puzzle-diff:  ## your answer to puzzle N=5 beside the repository's lines
	@dev/puzzles/puzzle.sh diff '$(N)' || [ $$? = 1 ]

puzzle-give-up:  ## the solution of puzzle N=5
	@dev/puzzles/puzzle.sh give-up '$(N)'

puzzle-again:  ## puts your answer to puzzle N=5 aside and begins with a new copy
	@dev/puzzles/puzzle.sh again '$(N)'

puzzle-refresh:  ## makes the patches of all puzzles again, after the trainers have changed
	@dev/puzzles/puzzle.sh refresh

# A learner needs no GPU: these programs are the stand-ins'.
detective:  ## opens case N=1: a trainer with one planted bug, and its symptom; without N: the list
ifdef N
	@dev/setup.sh cpu '$(CXX)' '$(CC)' $(MPI)
	@dev/puzzles/detective.sh open '$(N)'
else
	@dev/puzzles/detective.sh list
endif

detective-answer:  ## judges an answer to case N=1: AT=train_gpt_3d.cu:437, the place of the bug
	@dev/puzzles/detective.sh answer '$(N)' '$(AT)'

detective-hint:  ## the next of the three hints of case N=1
	@dev/puzzles/detective.sh hint '$(N)'

detective-give-up:  ## the bug of case N=1
	@dev/puzzles/detective.sh give-up '$(N)'

break:  ## breaks a copy of a trainer, builds and runs it: experiment N=2; without N: the list
ifdef N
	@dev/setup.sh cpu '$(CXX)' '$(CC)' $(MPI)
endif
	@dev/break.sh '$(N)'

# ---- make fuzz, make soak ------------------------------------------------------------------------

fuzz:  ## feeds damaged files to every loader, with clang's libFuzzer: SECONDS=120 in all
	@dev/fuzz/run.sh $(or $(SECONDS),120)

soak:  ## kills, full disks, Ctrl-Z, wrong clocks, other layouts at random: MINUTES=10, SEED=n
	@dev/setup.sh $(PROBED)
	+@$(PARALLEL) DEVICE=$(DEVICE) build-soak
	@dev/soak.sh $(DIR) $(or $(MINUTES),10) $(SEED)

build-soak: $(call program,train_gpt.cu train_gpt_3d.cu) build/tools/byte_corpus

# ---- make test -----------------------------------------------------------------------------------

test:  ## builds and runs every test; the last line is `N passed, N failed`
	@dev/setup.sh $(PROBED)
	@dev/test/run_tests.sh --plan $(DEVICE) '$(ONLY)' > build/test-plan
	@: > build/test-built
	+@$(MAKE) -n DEVICE=$(DEVICE) TESTING=1 V= $(PLANNED_ALL) | \
	    sed -n "s/.*run_tests.sh --building '\(.*\)';.*/\1/p" > build/test-unbuilt
	+@$(PARALLEL) DEVICE=$(DEVICE) TESTING=1 $(PLANNED_ALL)
	@dev/test/run_tests.sh $(DEVICE) '$(ONLY)'

PLANNED_ALL = planned-fp32 planned-bf16 $(if $(filter cpu,$(DEVICE)),planned-asan \
    planned-shapes planned-queue planned-profile planned-tune)

# All three at once, so that no core waits for the last program of one of them.
planned-fp32 planned-bf16: planned-%:
	+@$(MAKE) --no-print-directory PRECISION=$* planned
planned-asan:
	+@$(MAKE) --no-print-directory PRECISION=fp32 SANITIZE=1 planned
planned-shapes:
	+@$(MAKE) --no-print-directory PRECISION=fp32 GPU_SHAPES=1 planned
	+@$(MAKE) --no-print-directory PRECISION=bf16 GPU_SHAPES=1 planned
planned-queue:
	+@$(MAKE) --no-print-directory PRECISION=fp32 GPU_QUEUE=1 planned
planned-profile:
	+@$(MAKE) --no-print-directory PRECISION=bf16 PROFILE=1 planned
planned-tune:
	+@$(MAKE) --no-print-directory PRECISION=fp32 TUNE=1 planned

# The plan's programs for this combination; the tools belong to the first.
FIRST_COMBINATION := $(filter $(DIR),build/$(DEVICE)-fp32$(addprefix -,$(MPI)))
PLANNED = $(if $(filter planned,$(MAKECMDGOALS)),$(shell sort -u build/test-plan))
planned: $(filter $(DIR)/% $(if $(FIRST_COMBINATION),build/tools/%),$(PLANNED))
	@:

# Most of a trainer is kernels and headers that all trainers have. If three of a plan's trainers are
# not built yet, these are compiled once: the trainers are then one program with many names, as fast
# as each alone.
TOGETHER := $(if $(filter cpu,$(DEVICE)),$(filter $(DIR)/train_%,$(PLANNED)))
UNBUILT := $(filter-out $(wildcard $(TOGETHER)),$(TOGETHER))
ifneq ($(and $(word 3,$(TOGETHER)),$(or $(word 3,$(UNBUILT)),$(wildcard $(DIR)/train_all))),)
$(DIR)/train_all.cu: $(TRAINERS) $(LESSONS) dev/test/together.sh
	@mkdir -p $(@D)
	@dev/test/together.sh $(TRAINERS) $(LESSONS) > $@

$(DIR)/train_all: $(DIR)/train_all.cu Makefile $(PROBE)
	$(SAY)$(CU) $(DEPENDENCIES) -o $@ $< $(LIBS)

$(TOGETHER): $(DIR)/train_all
	@sed 's|^$(DIR)/train_all:|$@:|' $<.d > $@.d && ln -f $< $@
endif
