# Compiles one HIP source for one architecture and looks at what came out.
execute_process(
  COMMAND "${CLANG}" ${FLAGS} --offload-arch=${ARCH} -Rpass-analysis=kernel-resource-usage -MD -MF "${OBJECT}.d"
          -MT "${OBJECT}" -c "${SOURCE}" -o "${OBJECT}"
  RESULT_VARIABLE status ERROR_VARIABLE remarks)
if(status)
  message(FATAL_ERROR "${remarks}")
endif()
if(remarks MATCHES "(Spill|ScratchSize[^:]*): [1-9]")
  message(FATAL_ERROR "${ARCH}: a kernel spills or uses scratch memory\n${remarks}")
endif()
if(remarks MATCHES "warning:")
  message(WARNING "${remarks}")
endif()
execute_process(COMMAND "${OBJDUMP}" -d "${OBJECT}" OUTPUT_VARIABLE assembly RESULT_VARIABLE status)
foreach(instruction IN LISTS INSTRUCTIONS)
  if(status OR NOT assembly MATCHES "${instruction}")
    file(REMOVE "${OBJECT}")
    message(FATAL_ERROR "${ARCH}: no ${instruction} in the disassembly")
  endif()
endforeach()
