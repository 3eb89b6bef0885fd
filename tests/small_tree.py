"""A llama.cpp in miniature: the same folders, targets and CMake switches, a second to compile."""

from __future__ import annotations

import shutil
from pathlib import Path

from routewise.build import SHIM_DIR

FILES = {
    "CMakeLists.txt": """
        cmake_minimum_required(VERSION 3.14...3.28)
        project("llama.cpp" C CXX)
        set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
        set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
        add_subdirectory(ggml)
        add_subdirectory(src)
        add_subdirectory(common)
        add_subdirectory(tools)
    """,
    "cmake/common.cmake": "# nothing\n",
    "LICENSE": "MIT\n",
    "ggml/CMakeLists.txt": "add_subdirectory(src)\n",
    "ggml/include/ggml.h": """
        #pragma once
        #include <stdio.h>
        #include <stdlib.h>
        #define GGML_ABORT(text) (printf("%s:%d: %s", __FILE__, __LINE__, text), abort())
        #define GGML_ASSERT(x) do { if (!(x)) { GGML_ABORT(#x); } } while (0)
        #ifdef __cplusplus
        extern "C" {
        #endif
        float ggml_dot(const float * a, const float * b, int n);
        const char * ggml_commit(void);
        #ifdef __cplusplus
        }
        #endif
    """,
    "ggml/src/CMakeLists.txt": """
        configure_file(ggml-version.h.in ${CMAKE_CURRENT_BINARY_DIR}/ggml-version.h @ONLY)
        add_library(ggml-base SHARED ggml.c)
        target_include_directories(ggml-base PUBLIC ../include PRIVATE ${CMAKE_CURRENT_BINARY_DIR})
        set_target_properties(ggml-base PROPERTIES VERSION 0.25.3 SOVERSION 0)
        add_subdirectory(ggml-cpu)
    """,
    "ggml/src/ggml-version.h.in": '#define GGML_COMMIT "@LLAMA_BUILD_COMMIT@"\n',
    "ggml/src/ggml.c": """
        #include "ggml.h"
        #include "ggml-version.h"
        const char * ggml_commit(void) { return GGML_COMMIT; }
    """,
    "ggml/src/ggml-cpu/CMakeLists.txt": """
        file(GLOB sources *.cpp)
        add_library(ggml-cpu SHARED ${sources})
        target_link_libraries(ggml-cpu PUBLIC ggml-base)
        set_target_properties(ggml-cpu PROPERTIES VERSION 0.25.3 SOVERSION 0)
    """,
    "ggml/src/ggml-cpu/dot.cpp": """
        #include "ggml.h"

        // the sum, from left to right
        extern "C" float ggml_dot(const float * a, const float * b, int n) {
            float sum = 0.0f;
            GGML_ASSERT(n >= 0 && ggml_commit());
            for (int i = 0; i < n; ++i) {
                sum += a[i] * b[i];
            }
            return sum;
        }
    """,
    "ggml/src/ggml-cuda/dot.cu": "// not compiled here\n",
    "include/llama.h": '#pragma once\nextern "C" float llama_norm(const float * x, int n);\n',
    "src/CMakeLists.txt": """
        add_library(llama SHARED llama.cpp llama-batch.cpp)
        target_include_directories(llama PUBLIC ../include)
        target_link_libraries(llama PUBLIC ggml-cpu)
        set_target_properties(llama PROPERTIES VERSION 0.5.0 SOVERSION 0)
    """,
    "src/llama.cpp": """
        #include "llama.h"
        #include "ggml.h"
        float llama_norm(const float * x, int n) { return ggml_dot(x, x, n); }
    """,
    "src/llama-batch.cpp": "int llama_batch_size(void) { return 512; }\n",
    "common/CMakeLists.txt": "add_library(llama-common STATIC common.cpp)\n",
    "common/common.cpp": "int common_threads() { return 2; }\n",
    "tools/CMakeLists.txt": """
        foreach(tool quantize bench)
            add_executable(llama-${tool} ${tool}/main.cpp)
            target_link_libraries(llama-${tool} PRIVATE llama llama-common)
        endforeach()
    """,
    "tools/quantize/main.cpp": """
        #include "llama.h"
        #include <cstdio>
        int main() { const float x[2] = {3, 4}; std::printf("%.0f\\n", llama_norm(x, 2)); }
    """,
    "tools/bench/main.cpp": "int main() { return 0; }\n",
    "tools/server/server.cpp": "int main() { return 0; }\n",
    "vendor/README": "nothing\n",
    "docs/long.txt": "not part of a build\n",
}

SHIM = """
#include "llama.h"
extern "C" __attribute__((visibility("default"))) const char * rw_identity(void) {
    return ROUTEWISE_IDENTITY;
}
extern "C" __attribute__((visibility("default"))) float rw_norm(const float * x, int n) {
    return llama_norm(x, n);
}
"""


def make_tree(root: Path) -> Path:
    """Write the miniature to ``root`` and return it."""
    for file, text in FILES.items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        margin = min((len(li) - len(li.lstrip()) for li in lines if li.strip()), default=0)
        path.write_text("\n".join(line[margin:] for line in lines).rstrip() + "\n")
    return root


def make_shim(folder: Path) -> Path:
    """Write a shim that the miniature can link, with the real super-project; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(SHIM_DIR / "CMakeLists.txt", folder)
    (folder / "routewise_shim.cpp").write_text(SHIM)
    return folder
