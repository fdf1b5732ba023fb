// library_types.h: the number types that cuBLASLt and the launch helpers name, as CUDA numbers them.
#ifndef LLMC_CPU_LIBRARY_TYPES_H
#define LLMC_CPU_LIBRARY_TYPES_H

typedef enum cudaDataType_t {
    CUDA_R_32F = 0,
    CUDA_R_64F = 1,
    CUDA_R_16BF = 14,
} cudaDataType_t;
typedef cudaDataType_t cudaDataType;

#endif
