// reduce.h: the arithmetic of the reductions. Element i of the result is ((x0 + x1) + x2) + ... over the
// ranks in their order, so its bits depend neither on who computes it, nor on how the buffer is cut, nor on
// what arrives first. bfloat16 is added up in fp32 and rounded once, at the end.
#ifndef LLMC_MPI_REDUCE_H
#define LLMC_MPI_REDUCE_H

#include "llmc/host/bf16.h"
#include "llmc/mpi/types.h"

namespace nccl_mpi {

// How an element of type T is read into an accumulator and written back.
template <typename T>
struct Element {
    typedef T Sum;
    static T read(T x) { return x; }
    static T write(T x) { return x; }
};
template <>
struct Element<uint16_t> {  // no 16-bit integer is carried: these are bfloat16
    typedef float Sum;
    static float read(uint16_t x) { return bf16_to_float(x); }
    static uint16_t write(float x) { return bf16_from_float(x); }
};

// out[i] = reduction over the n inputs, in their order. out may be one of the inputs.
template <typename T>
void reduce_typed(T *out, const char *const *inputs, int n, size_t count, int redop) {
    typedef typename Element<T>::Sum Sum;
    enum { BLOCK = 1024 };  // what stays in the first-level cache, and what makes out == inputs[k] safe
    Sum sum[BLOCK];
    for (size_t begin = 0; begin < count; begin += BLOCK) {
        size_t size = count - begin < (size_t)BLOCK ? count - begin : (size_t)BLOCK;
        for (int r = 0; r < n; r++) {
            const T *in = (const T *)inputs[r] + begin;
            if (r == 0) {
                for (size_t i = 0; i < size; i++) sum[i] = Element<T>::read(in[i]);
            } else if (redop == ncclMax || redop == ncclMin) {
                bool max = redop == ncclMax;
                for (size_t i = 0; i < size; i++) {  // a NaN on any rank reaches the result
                    Sum x = Element<T>::read(in[i]);
                    bool keep = sum[i] != sum[i] || (max ? sum[i] >= x : sum[i] <= x);
                    sum[i] = keep ? sum[i] : x;
                }
            } else {
                for (size_t i = 0; i < size; i++) sum[i] = (Sum)(sum[i] + Element<T>::read(in[i]));
            }
        }
        if (redop == ncclAvg) {
            for (size_t i = 0; i < size; i++) sum[i] = (Sum)(sum[i] / (Sum)n);
        }
        for (size_t i = 0; i < size; i++) out[begin + i] = Element<T>::write(sum[i]);
    }
}

// inputs: n pointers, one per rank. count elements of a carried type (ncclDataType_t), redop as ncclRedOp_t.
inline void reduce(void *out, const char *const *inputs, int n, size_t count, int type, int redop) {
    switch (type) {
        case ncclUint8: reduce_typed((uint8_t *)out, inputs, n, count, redop); break;
        case ncclBfloat16: reduce_typed((uint16_t *)out, inputs, n, count, redop); break;
        case ncclInt32: reduce_typed((int32_t *)out, inputs, n, count, redop); break;
        case ncclFloat32: reduce_typed((float *)out, inputs, n, count, redop); break;
        case ncclInt64: reduce_typed((int64_t *)out, inputs, n, count, redop); break;
        case ncclFloat64: reduce_typed((double *)out, inputs, n, count, redop); break;
        default: break;  // refused when the call was made
    }
}

}  // namespace nccl_mpi

#endif
